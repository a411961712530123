// `tilemoe doctor`: whether the library computes right on this machine's GPU: what `tilemoe info`
// prints, the reduced registry by each arch, and the archs' bits compared. Exit status 1 if something
// failed.
#include <algorithm>
#include <iostream>
#include <stdexcept>

#include "arch_run.h"
#include "commands.h"
#include "cuda/doctor_gpu.h"
#include "device.h"
#include "exit_status.h"
#include "info.h"
#include "output_file.h"
#include "train/status_line.h"
#include "verify/selection.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;

struct DoctorOptions {
  std::string device = "cuda";
  ArchOption arch;
  int limit_s = 600;
  std::string json_file;
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

std::string why_no_gpu(const std::string& reason) {
  const std::string lacks = what_the_build_lacks();
  return reason + (lacks.empty() ? "" : "; " + lacks) +
         "; `tilemoe check --device cpu` compares the CPU's results with float64, case by case";
}

std::vector<ArchRun> run_archs(const std::vector<std::string>& archs, int index, int limit_s) {
  std::vector<ArchRun> runs;
  const std::vector<verify::Case> cases = verify::Selection{.reduced = true}.choose(Device::kCuda);
  train::StatusLine status(stderr);
  for (const std::string& arch : archs)
    runs.push_back(run_arch({.arch = arch,
                             .cases = cases,
                             .max_silence = std::chrono::seconds(limit_s),
                             .select =
                                 [&](const std::string& name) {
                                   if (index > 0) use_gpu(index);
                                   return why_no_arch(name);
                                 },
                             .memory = verify::cuda_memory,
                             .on_case =
                                 [&](size_t i) {
                                   status.draw(
                                       {arch + " " + cases[i].name},
                                       static_cast<double>(i) / static_cast<double>(cases.size()));
                                 }}));
  status.clear();
  return runs;
}

int examine(const DoctorOptions& options) {
  const int index = index_of(options.device);
  const std::string selected = options.arch.name();
  check_writable(options.json_file);
  const std::vector<ArchRun> runs = run_archs(
      selected.empty() ? kArchs : std::vector<std::string>{selected}, index, options.limit_s);
  if (index > 0) use_gpu(index);
  if (const std::string reason = why_unavailable(Device::kCuda); !reason.empty())
    throw std::runtime_error(why_no_gpu(reason));

  const json about = info();
  print_info(about, std::cout);
  std::cout << "\nComparison with float64, reduced registry\n";
  std::string passed, failed;
  json report = {{"info", about}, {"archs", json::array()}, {"differences", json::array()}};
  const ArchRun* first = nullptr;  // that ran; the others' bits are its own
  for (const ArchRun& run : runs) {
    std::cout << run.text();
    report["archs"].push_back(run.json());
    if (!run.skipped.empty()) continue;
    bool good = run.failures.empty();
    if (first) {
      const std::vector<std::string> lines = differences(run, *first);
      for (const std::string& line : lines) {
        std::cout << "  " << line << "\n";
        report["differences"].push_back(line);
      }
      std::cout << run.arch << " and " << first->arch << ": " << tensors_compared(run, *first)
                << " tensors compared bit for bit, " << lines.size() << " cases differ\n";
      good = good && lines.empty();
    } else {
      first = &run;
    }
    std::string& names = good ? passed : failed;
    names += (names.empty() ? "" : ", ") + run.arch;
  }
  const bool all_good = failed.empty() && !passed.empty();
  report["passed"] = all_good;
  if (failed.empty() && passed.empty()) failed = "no arch runs on this GPU";
  std::cout << "\n"
            << (failed.empty() ? "" : "FAILED: " + failed)
            << (failed.empty() || passed.empty() ? "" : "; ")
            << (passed.empty() ? "" : "passed: " + passed) << "\n";
  write_file(options.json_file, report.dump(2) + "\n");
  return all_good ? kDone : kFailed;
}

}  // namespace

void add_doctor(CLI::App& app, Run& run) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* command =
      app.add_subcommand("doctor", "Check the library on this machine's GPU with each arch");
  command->add_option("--device", options->device, "GPU: cuda, or cuda:N in CUDA's numbering")
      ->capture_default_str();
  options->arch.add_to(*command, "Only this arch (default: all that the GPU runs)");
  add_limit(*command, options->limit_s);
  command->add_option("--json", options->json_file, "Write the report to this file as JSON");
  command->callback([&run, options] { run = [options] { return examine(*options); }; });
}

}  // namespace tilemoe::app
