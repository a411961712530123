// tilemoe_simulate: runs cases of the verification registry on the simulated GPU and prints what is
// found wrong; can draw one.
#include <fnmatch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "simulator/machine/machine.h"
#include "tilemoe/error.h"
#include "verify/check.h"
#include "verify/registry.h"

namespace tilemoe::simulator {
namespace {

struct Options {
  std::vector<std::string> cases;
  std::string device = "sm80";
  uint64_t seed = 1, data_seed = 1;
  int64_t seeds = 1;
  bool reduced = false, integers = false, trace = false, list = false;
  int columns = 160;
};

// What is simulated is few multiprocessors, so that a block has several tiles.
DeviceKind device_kind(const std::string& name) {
  if (name == "sm80") return {"a simulated A100", 8, 0, 163 * 1024, 3};
  if (name == "sm86") return {"a simulated GPU of 99 KiB", 8, 6, 99 * 1024, 3};
  return {"a simulated H100", 9, 0, 227 * 1024, 4};
}

bool matches(const verify::Case& one, const Options& options) {
  if (one.dtype == DType::kFloat32 || one.too_large || one.huge) return false;
  if (options.reduced && !one.reduced) return false;
  if (options.cases.empty()) return true;
  for (const std::string& pattern : options.cases)
    if (fnmatch(pattern.c_str(), one.name.c_str(), 0) == 0) return true;
  return false;
}

std::string describe(const verify::Report& report) {
  std::string text;
  for (const verify::TensorReport& tensor : report.tensors)
    if (!tensor.passed)
      text += std::string("\n  ") + verify::output_name(tensor.output) + ": " +
              verify::describe(tensor.figures, tensor.limit);
  for (const std::string& line : report.damage) text += "\n  " + line;
  return text;
}

// True where nothing is wrong.
bool run(const verify::Case& one, const Options& options, uint64_t seed) {
  Machine& machine = Machine::instance();
  machine.set_seed(seed);
  machine.trace().clear();
  machine.trace().keep(options.trace);
  const auto begin = std::chrono::steady_clock::now();
  std::string wrong;
  try {
    const verify::Report report =
        verify::check_case(one, options.data_seed, verify::memory_of(Device::kCuda));
    wrong = describe(report);
  } catch (const std::exception& error) {
    wrong = std::string("\n  ") + error.what();
  }
  const std::vector<Finding> findings = machine.take_findings();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::cout << one.name << (one.data == verify::Data::kIntegers ? " (integers)" : "") << ", seed "
            << seed << ": " << (wrong.empty() ? "right" : "WRONG") << ", " << findings.size()
            << " findings, trace " << std::hex << machine.trace().digest() << std::dec << ", "
            << std::fixed << std::setprecision(1) << seconds.count() << " s" << wrong << "\n";
  for (const Finding& finding : findings) std::cout << describe(finding) << "\n";
  if (options.trace) machine.trace().draw(std::cout, options.columns);
  std::cout.flush();
  return wrong.empty() && findings.empty();
}

int simulate(const Options& options) {
  Machine::instance().set_device(device_kind(options.device));
  std::vector<verify::Case> cases;
  for (const verify::Case& one : verify::verification_cases()) {
    if (!matches(one, options)) continue;
    if (!options.integers)
      cases.push_back(one);
    else if (verify::has_integer_form(one))
      cases.push_back(verify::integer_form(one));
  }
  if (cases.empty()) {
    std::cerr << "no case matches; `tilemoe_simulate --list` names them all\n";
    return 2;
  }
  int64_t failures = 0;
  for (const verify::Case& one : cases) {
    if (options.list) {
      std::cout << one.name << "\n";
      continue;
    }
    for (int64_t i = 0; i < options.seeds; ++i)
      if (!run(one, options, options.seed + static_cast<uint64_t>(i))) ++failures;
  }
  if (!options.list)
    std::cout << cases.size() << " cases, " << options.seeds << " seeds each, " << failures
              << " failures\n";
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tilemoe::simulator

int main(int argc, char** argv) {
  tilemoe::simulator::Options options;
  CLI::App app("Runs cases of the registry on a simulated GPU, whose schedule a seed decides");
  app.add_option("case", options.cases, "Cases to run: names or patterns; without them all");
  app.add_option("--device", options.device, "What is simulated: sm80, sm86 (99 KiB) or sm90")
      ->check(CLI::IsMember({"sm80", "sm86", "sm90"}))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of the schedule")->capture_default_str();
  app.add_option("--seeds", options.seeds, "How many seeds to try, from that one on")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--data-seed", options.data_seed, "Seed of the data")->capture_default_str();
  app.add_flag("--reduced", options.reduced, "Only the quick cases that together run every kernel");
  app.add_flag("--integers", options.integers, "Cases in their form of small whole numbers");
  app.add_flag("--trace", options.trace, "Draw what every warp did over simulated time");
  app.add_option("--columns", options.columns, "Width of the drawing")
      ->check(CLI::Range(20, 10000))
      ->capture_default_str();
  app.add_flag("--list", options.list, "List the cases and do nothing else");
  CLI11_PARSE(app, argc, argv);
  try {
    return tilemoe::simulator::simulate(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
