// `tilemoe doctor`: whether the library computes right on this machine's GPU, how fast, and a short
// report of it. With --blackwell, whether a kit that was never run may be taken there. Exit status 1
// where something failed.
#include <chrono>
#include <iostream>
#include <stdexcept>

#include "bench_steps.h"
#include "build_info.h"
#include "checker.h"
#include "commands.h"
#include "compare_kits.h"
#include "cuda/doctor_gpu.h"
#include "device.h"
#include "doctor_report.h"
#include "exit_status.h"
#include "output_file.h"
#include "train/status_line.h"
#include "trial.h"
#include "verify/registry.h"

namespace tilemoe::app {
namespace {

using verify::Case;

// Run in this process, so none that was never run elsewhere.
constexpr const char* kKits[] = {"sm80", "sm90"};
constexpr const char* kOnTrial = "sm100";
constexpr const char* kReference = "sm80";
// Many narrow experts, few wide ones, and few rows an expert; with gradients they take 2 to 6 GiB.
constexpr const char* kTimed[] = {"7b-n256", "wide", "few-rows"};

struct DoctorOptions {
  std::string device = "cuda";
  std::string kit = "all";
  std::string text_file, json_file;
  bool no_times = false;
  bool blackwell = false;
  int limit_s = 600;
  std::string compare;  // a kit
};

int index_of(const std::string& device) {
  if (device == "cuda") return 0;
  const std::string prefix = "cuda:";
  const std::string digits = device.starts_with(prefix) ? device.substr(prefix.size()) : "";
  if (digits.empty() || digits.size() > 3 ||
      digits.find_first_not_of("0123456789") != std::string::npos)
    throw WrongUsage("--device " + device +
                     ": expected cuda or cuda:N; `tilemoe check --device cpu` compares the CPU's "
                     "results with float64");
  return std::stoi(digits);
}

std::vector<Case> cases_to_check() {
  std::vector<Case> cases;
  for (const Case& one : verify::verification_cases())
    if (one.reduced && one.dtype != DType::kFloat32) cases.push_back(one);
  return cases;
}

void check_cases(DoctorKit& kit) {
  const std::vector<Case> cases = cases_to_check();
  const auto start = std::chrono::steady_clock::now();
  Checker checker(1, 0, verify::memory_of(Device::kCuda), verify::Passes::kAll);
  train::StatusLine status(stderr);
  std::string broken;
  for (size_t i = 0; i < cases.size() && broken.empty(); ++i) {
    status.draw({kit.kit + " " + std::to_string(i + 1) + "/" + std::to_string(cases.size()) + " " +
                 cases[i].name},
                static_cast<double>(i) / static_cast<double>(cases.size()));
    try {
      checker.run(cases[i]);
      ++kit.cases;
    } catch (const std::exception& error) {  // the GPU does no more for this process
      broken = cases[i].name + ": " + error.what() + "; the cases after it were not run";
    }
  }
  kit.tensors = checker.tensors();
  kit.failures = checker.failures();
  if (!broken.empty()) kit.failures.insert(kit.failures.begin(), broken);
  kit.seconds = milliseconds_since(start) / 1000;
}

void time_layers(DoctorKit& kit) {
  train::StatusLine status(stderr);
  double done = 0;
  for (const char* name : kTimed) {
    status.draw({kit.kit + " timing " + name}, done++ / static_cast<double>(std::size(kTimed)),
                true);
    kit.times.push_back(time_layer(*verify::find_case(name)));
  }
}

// Why the library does not run with it here.
std::string why_not(const std::string& kit) {
  if (tilemoe_set_cuda_kit(kit.c_str()) != TILEMOE_SUCCESS) return in_words(tilemoe_last_error());
  const std::string said = tilemoe_cuda_kit();
  return *tilemoe_last_error() ? in_words(said) : "";
}

DoctorKit examine(const std::string& name, const DoctorOptions& options) {
  DoctorKit kit{.kit = name, .skipped = why_not(name), .failures = {}, .times = {}};
  if (!kit.skipped.empty()) return kit;
  check_cases(kit);
  if (!options.no_times && kit.failures.empty()) time_layers(kit);
  return kit;
}

std::string why_no_gpu(const std::string& reason) {
  const std::string lacks = what_the_build_lacks();
  return reason + (lacks.empty() ? "" : "; " + lacks) +
         "; `tilemoe check --device cpu` compares the CPU's results with float64, case by case";
}

int examine_gpu(const DoctorOptions& options) {
  const int index = index_of(options.device);
  if (index > 0) use_gpu(index);  // the first may be one that the library does not run on
  if (const std::string reason = why_unavailable(Device::kCuda); !reason.empty())
    throw std::runtime_error(why_no_gpu(reason));
  check_writable(options.text_file);
  check_writable(options.json_file);
  const BuildInfo build = build_info();
  DoctorReport report{.version = build.version,
                      .commit = build.commit,
                      .build = build.build_type + ", " + build.compiler,
                      .gpu = describe_gpu(),
                      .kit = {},
                      .kits = {}};
  check(tilemoe_set_cuda_kit(nullptr));
  report.kit = tilemoe_cuda_kit();
  if (*tilemoe_last_error()) report.kit = "none, " + in_words(report.kit);
  for (const std::string name : kKits)
    if (options.kit == "all" || options.kit == name) report.kits.push_back(examine(name, options));
  check(tilemoe_set_cuda_kit(nullptr));
  std::cout << report.text();
  write_file(options.text_file, report.text());
  write_file(options.json_file, report.json().dump(2) + "\n");
  return report.passed() ? kDone : kFailed;
}

// What try_kit()'s child does.
int tell_comparison(const DoctorOptions& options) {
  const auto tell = [](const nlohmann::json& event) {
    std::cout << event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  };
  const auto refuse = [&](const std::string& why) {
    tell({{"refused", why}});
    return kFailed;
  };
  const int index = index_of(options.device);
  if (index > 0) use_gpu(index);
  if (const std::string why = why_unavailable(Device::kCuda); !why.empty()) return refuse(why);
  for (const std::string& kit : {options.compare, std::string(kReference)})
    if (const std::string why = why_not(kit); !why.empty()) return refuse(why);
  compare_kits({.kit = options.compare,
                .reference = kReference,
                .cases = cases_to_check(),
                .memory = verify::cuda_memory(),
                .use_kit = [](const auto& kit) { check(tilemoe_set_cuda_kit(kit.c_str())); },
                .tell = tell});
  return kDone;
}

int try_blackwell(const DoctorOptions& options) {
  const int index = index_of(options.device);
  check_writable(options.text_file);
  check_writable(options.json_file);
  train::StatusLine status(stderr);
  const TrialReport report = try_kit(
      {.key = verdict_key_of(index, kOnTrial),
       .folder = cuda::state_folder(),
       .command = {"/proc/self/exe", "doctor", "--compare", kOnTrial, "--device", options.device},
       .most_silent = std::chrono::seconds(options.limit_s),
       .on_step = [&](const auto& step, double done) { status.draw({step}, done); }});
  status.clear();
  std::cout << report.text();
  write_file(options.text_file, report.text());
  write_file(options.json_file, report.json().dump(2) + "\n");
  return report.agreed() ? kDone : kFailed;
}

}  // namespace

void add_doctor(CLI::App& app, Run& run) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* command = app.add_subcommand(
      "doctor",
      "Check and time the library on this machine's GPU: a report to paste into an issue");
  command->add_option("--device", options->device, "The GPU: cuda, or cuda:N as CUDA counts them")
      ->capture_default_str();
  CLI::Option* kit =
      command
          ->add_option(
              "--kit", options->kit,
              "Which kernels: sm80, sm90, or all that the GPU runs (whatever TILEMOE_KIT says)")
          ->check(CLI::IsMember({"all", "sm80", "sm90"}))
          ->capture_default_str();
  CLI::Option* no_times =
      command->add_flag("--no-times", options->no_times, "Leave out the layers that are timed");
  CLI::Option* blackwell = command->add_flag(
      "--blackwell", options->blackwell,
      "Compare the kit sm100, which its authors never ran, with sm80, in a process of its own; "
      "where they agree, programs take sm100 from then on");
  blackwell->excludes(kit)->excludes(no_times);
  command
      ->add_option("--limit", options->limit_s,
                   "After how many silent seconds that process counts as hung")
      ->check(CLI::Range(1, 86400))
      ->needs(blackwell)
      ->capture_default_str();
  command
      ->add_option("--compare", options->compare,
                   "What --blackwell has that process do, for any kit: compare it with sm80, and "
                   "print a line of JSON an event")
      ->check(CLI::IsMember({"sm90", "sm100"}))
      ->excludes(blackwell);
  command->add_option("--out", options->text_file, "Write the report to this file too");
  command->add_option("--json", options->json_file, "Write the numbers to this file as JSON");
  command->callback([&run, options] {
    run = [options] {
      if (options->blackwell) return try_blackwell(*options);
      return options->compare.empty() ? examine_gpu(*options) : tell_comparison(*options);
    };
  });
}

}  // namespace tilemoe::app
