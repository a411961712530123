// tilemoe_simulate: runs cases of the verification registry on a simulated GPU, prints its
// findings, and can draw what happened.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "commit.h"
#include "simulator/machine/machine.h"
#include "simulator/run_case.h"
#include "simulator/setting.h"
#include "simulator/side_by_side.h"
#include "tilemoe/tilemoe.h"
#include "verify/digest.h"
#include "verify/patterns.h"
#include "verify/registry.h"

namespace tilemoe::simulator {
namespace {

struct Options {
  std::vector<std::string> cases, except;
  std::vector<std::string> devices = {"sm80"};
  uint64_t seed = 1, data_seed = 1;
  int64_t seeds = 1;
  bool all = false, reduced = false, integers = false, trace = false, list = false;
  int columns = 160, jobs = 1, defect = 0;
  std::string schedule = "any", json, expected;
};

// A job's result, for the parent process.
struct Result {
  int64_t seeds_done, seeds_wrong, seeds_with_findings;
  uint64_t bits;  // of the last seed
  int64_t equal_to_gpu;
  double seconds;
};

bool matches(const verify::Case& one, const Options& options) {
  if (one.dtype == DType::kFloat32 || one.too_large || one.huge) return false;
  if (options.reduced && !one.reduced) return false;
  const bool excluded = !options.except.empty() && verify::matches_any(options.except, one.name);
  return !excluded && verify::matches_any(options.cases, one.name);
}

std::string name_of(const Job& job, bool with_setting) {
  return job.test_case.name + (job.test_case.data == verify::Data::kIntegers ? " (integers)" : "") +
         (with_setting ? std::string(" on ") + job.setting->name : "");
}

// A GPU's digests, by the name of each setting with the GPU's arithmetic.
using Expected = std::map<std::string, ExpectedDigests>;

Expected expected_of(const Options& options) {
  Expected found;
  if (options.expected.empty()) return found;
  for (const std::string& device : options.devices) {
    const Setting& setting = setting_of(device);
    if (same_bits(setting, setting_of("sm90")))
      found.try_emplace(device, options.expected, setting.arch);
  }
  if (found.empty())
    throw std::runtime_error(options.expected + " is from a Hopper GPU, and none is simulated");
  return found;
}

std::vector<Job> jobs_of(const Options& options, const Expected& expected) {
  std::vector<Job> jobs;
  for (const std::string& device : options.devices) {
    const auto found = expected.find(device);
    for (const verify::Case& one : verify::verification_cases()) {
      if (!matches(one, options) || !verify::arch_computes(setting_of(device).arch, one)) continue;
      if (options.integers && !verify::has_integer_form(one)) continue;
      jobs.push_back({&setting_of(device), options.integers ? verify::integer_form(one) : one,
                      options.data_seed, options.seed, options.seeds,
                      all_schedules().at(options.schedule),
                      found == expected.end() || options.integers ? nullptr : &found->second});
    }
  }
  return jobs;
}

// In one piece, so that processes do not interrupt each other.
void print(const std::string& text) {
  std::cout << text << std::flush;
}

Result run(const Job& job, const std::string& name, const Options& options) {
  Result result{};
  Trace& trace = Machine::instance().trace();
  run_case(job, [&](const SeedOutcome& outcome) {
    std::ostringstream text;
    text << name << ", seed " << outcome.seed << ": " << (outcome.wrong.empty() ? "right" : "WRONG")
         << ", " << outcome.findings.size() << " findings, trace "
         << verify::hexadecimal(outcome.trace) << ", " << std::fixed << std::setprecision(1)
         << outcome.seconds << " s" << outcome.wrong << "\n";
    for (const Finding& finding : outcome.findings) text << describe(finding) << "\n";
    if (options.trace) trace.draw(text, options.columns);
    print(text.str());
    ++result.seeds_done;
    if (!outcome.wrong.empty()) ++result.seeds_wrong;
    if (!outcome.findings.empty()) ++result.seeds_with_findings;
    result.bits = outcome.bits;
    result.equal_to_gpu += outcome.equal_to_gpu;
    result.seconds += outcome.seconds;
  });
  return result;
}

// Cases whose bits differ between settings with the same arithmetic.
std::vector<std::string> unequal_archs(const std::vector<Job>& jobs, const Result* results) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < jobs.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      if (jobs[i].test_case.name != jobs[j].test_case.name ||
          !same_bits(*jobs[i].setting, *jobs[j].setting) || results[i].bits == results[j].bits ||
          results[i].seeds_done == 0 || results[j].seeds_done == 0)
        continue;
      lines.push_back(name_of(jobs[i], true) + " has other bits than on " + jobs[j].setting->name);
    }
  return lines;
}

void write_json(const Options& options, const std::vector<Job>& jobs, const Result* results,
                const Expected& expected) {
  nlohmann::json items = nlohmann::json::array();
  for (size_t i = 0; i < jobs.size(); ++i)
    items.push_back({{"case", name_of(jobs[i], false)},
                     {"simulated", jobs[i].setting->name},
                     {"seeds_done", results[i].seeds_done},
                     {"seeds_wrong", results[i].seeds_wrong},
                     {"seeds_with_findings", results[i].seeds_with_findings},
                     {"bits", verify::hexadecimal(results[i].bits)},
                     {"tensors_equal_to_gpu", results[i].equal_to_gpu},
                     {"processor_seconds", std::round(10 * results[i].seconds) / 10}});
  nlohmann::json simulated;
  for (const std::string& device : options.devices) simulated[device] = setting_of(device).in_words;
  nlohmann::json report = {
      {"device", "CPU"},
      {"commit", TILEMOE_COMMIT},
      {"versions", {{"tilemoe", tilemoe_version()}, {"compiler", TILEMOE_COMPILER}}},
      {"simulated", simulated},
      {"schedule", options.schedule},
      {"first_seed", options.seed},
      {"seeds", options.seeds},
      {"unequal_bits", unequal_archs(jobs, results)},
      {"items", items}};
  if (!expected.empty()) report["gpu"] = expected.begin()->second.device();
  std::ofstream file(options.json);
  file << report.dump(1) << "\n";
  if (!file.flush()) throw std::runtime_error("cannot write " + options.json);
}

int simulate(Options options) {
  if (options.all) {
    options.reduced = true;
    options.devices.clear();
    for (const Setting& one : all_settings()) options.devices.emplace_back(one.name);
  }
  const Expected expected = expected_of(options);
  const std::vector<Job> jobs = jobs_of(options, expected);
  const auto name = [](const Job& job) { return job.test_case.name; };
  std::string wrong = verify::no_match(options.cases, jobs, name, "tilemoe_simulate --list");
  if (wrong.empty())
    wrong = verify::no_match(
        options.except, verify::verification_cases(),
        [](const verify::Case& one) { return one.name; }, "tilemoe_simulate --list");
  if (!wrong.empty()) {
    std::cerr << wrong << "\n";
    return 2;
  }
  const bool several = options.devices.size() > 1;
  if (options.list) {
    for (const Job& job : jobs) std::cout << name_of(job, several) << "\n";
    return 0;
  }
  Machine::instance().trace().keep(options.trace);
  Machine::instance().plant(options.defect);
  const SharedBytes shared(jobs.size() * sizeof(Result));
  auto* const results = static_cast<Result*>(shared.data());
  const auto run_one = [&](size_t i) {
    results[i] = run(jobs[i], name_of(jobs[i], several), options);
  };
  // The library reads TILEMOE_2CTA once per process.
  if (several || options.jobs > 1) {
    // After each case, since a search of hours may be cut off.
    side_by_side(jobs.size(), options.jobs, run_one, [&] {
      if (!options.json.empty()) write_json(options, jobs, results, expected);
    });
  } else {
    for (size_t i = 0; i < jobs.size(); ++i) run_one(i);
  }

  int64_t failures = 0;
  double seconds = 0;
  int64_t equal_to_gpu = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    seconds += results[i].seconds;
    equal_to_gpu += results[i].equal_to_gpu;
    const int64_t undone = options.seeds - results[i].seeds_done;
    if (undone > 0) std::cout << name_of(jobs[i], several) << " did not end\n";
    failures += undone + std::max(results[i].seeds_wrong, results[i].seeds_with_findings);
  }
  const std::vector<std::string> unequal = unequal_archs(jobs, results);
  for (const std::string& line : unequal) std::cout << line << "\n";
  failures += static_cast<int64_t>(unequal.size());
  if (!expected.empty()) {
    std::cout << equal_to_gpu << " tensors have the bits that a "
              << expected.begin()->second.device() << " computed\n";
    if (equal_to_gpu == 0) ++failures;  // nothing was compared
  }
  std::cout << jobs.size() << " cases, " << options.seeds << " seeds each, " << failures
            << " failures, " << std::fixed << std::setprecision(0) << seconds
            << " s of a processor\n";
  if (!options.json.empty()) write_json(options, jobs, results, expected);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tilemoe::simulator

int main(int argc, char** argv) {
  using namespace tilemoe::simulator;
  Options options;
  CLI::App app("Runs cases of the registry on a simulated GPU, whose schedule a seed decides");
  app.add_option("case", options.cases, "Cases to run: names or patterns; default: all");
  app.add_option("--except", options.except, "Cases not to run: names or patterns")
      ->delimiter(',')
      ->allow_extra_args(false);
  std::vector<std::string> names;
  std::string help = "What is simulated, one or several, separated by commas:";
  for (const Setting& one : all_settings()) {
    names.emplace_back(one.name);
    help += std::string("\n") + one.name + ": " + one.in_words;
  }
  app.add_option("--device", options.devices, help)
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  app.add_flag("--all", options.all, "The quick cases on every device with every arch");
  app.add_option("--seed", options.seed, "Seed of the schedule")->capture_default_str();
  app.add_option("--seeds", options.seeds, "How many seeds to try, from that one on")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--schedule", options.schedule, kScheduleHelp)
      ->check(CLI::IsMember(all_schedules()))
      ->capture_default_str();
  app.add_option("--data-seed", options.data_seed, "Seed of the data")->capture_default_str();
  app.add_flag("--reduced", options.reduced, "Only the quick cases that together run every kernel");
  app.add_flag("--integers", options.integers, "Cases in their form of small whole numbers");
  app.add_option("--jobs", options.jobs, "Processes side by side")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option(
         "--expected", options.expected,
         "Digests that a GPU computed (tests/data/digests.jsonl): if an H100 is simulated, its "
         "tensors must have the same bits")
      ->check(CLI::ExistingFile);
  app.add_option("--json", options.json, "Also write the result of each case to this file");
  app.add_flag("--trace", options.trace, "Draw what every warp did over simulated time");
  app.add_option("--columns", options.columns, "Width of the drawing")
      ->check(CLI::Range(20, 10000))
      ->capture_default_str();
  app.add_option("--defect", options.defect, "Row of defects.inc to switch on, from 1 on");
  app.add_flag("--list", options.list, "List the cases and do nothing else");
  CLI11_PARSE(app, argc, argv);
  try {
    return simulate(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
