// tilemoe_simulate_router: runs small cases of the router on a simulated GPU; tilemoe_simulate runs
// those of the layer.
#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "simulator/machine/machine.h"
#include "simulator/router_cases.h"
#include "simulator/setting.h"
#include "verify/patterns.h"

namespace tilemoe::simulator {
namespace {

struct Options {
  std::vector<std::string> cases;
  std::string device = "sm80", schedule = "any";
  uint64_t seed = 1, data_seed = 1;
  int64_t seeds = 1;
  bool list = false;
};

// True where nothing is wrong.
bool run(const RouterCase& one, uint64_t data_seed, uint64_t seed) {
  Machine& machine = Machine::instance();
  machine.set_seed(seed);
  std::string wrong;
  try {
    wrong = compare_devices(one, data_seed);
  } catch (const std::exception& error) {
    wrong = std::string("\n  ") + error.what();
  }
  const std::vector<Finding> findings = machine.take_findings();
  std::cout << one.name << ", seed " << seed << ": " << (wrong.empty() ? "right" : "WRONG") << ", "
            << findings.size() << " findings" << wrong << "\n";
  for (const Finding& finding : findings) std::cout << describe(finding) << "\n";
  std::cout.flush();
  return wrong.empty() && findings.empty();
}

int simulate(const Options& options) {
  Machine::instance().set_device(setting_of(options.device).device);
  Machine::instance().set_schedule(all_schedules().at(options.schedule));
  const std::string wrong = verify::no_match(options.cases, router_cases(), &RouterCase::name,
                                             "tilemoe_simulate_router --list");
  if (!wrong.empty()) {
    std::cerr << wrong << "\n";
    return 2;
  }
  int64_t cases = 0, failures = 0;
  for (const RouterCase& one : router_cases()) {
    if (!verify::matches_any(options.cases, one.name)) continue;
    ++cases;
    if (options.list) {
      std::cout << one.name << "\n";
      continue;
    }
    for (int64_t i = 0; i < options.seeds; ++i)
      if (!run(one, options.data_seed, options.seed + static_cast<uint64_t>(i))) ++failures;
  }
  if (!options.list)
    std::cout << cases << " cases, " << options.seeds << " seeds each, " << failures
              << " failures\n";
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tilemoe::simulator

int main(int argc, char** argv) {
  tilemoe::simulator::Options options;
  CLI::App app("Runs cases of the router on a simulated GPU, whose schedule a seed decides");
  app.add_option("case", options.cases, "Cases to run: names or patterns; default: all");
  std::vector<std::string> names;
  for (const tilemoe::simulator::Setting& one : tilemoe::simulator::all_settings())
    names.emplace_back(one.name);
  app.add_option("--device", options.device, "What is simulated, as in tilemoe_simulate")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of the schedule")->capture_default_str();
  app.add_option("--seeds", options.seeds, "How many seeds to try, from that one on")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--schedule", options.schedule, tilemoe::simulator::kScheduleHelp)
      ->check(CLI::IsMember(tilemoe::simulator::all_schedules()))
      ->capture_default_str();
  app.add_option("--data-seed", options.data_seed, "Seed of the data")->capture_default_str();
  app.add_flag("--list", options.list, "List the cases and do nothing else");
  CLI11_PARSE(app, argc, argv);
  return tilemoe::simulator::simulate(options);
}
