// `tilemoe check`: runs the verification cases on a backend and prints how far each tensor is from
// a float64 evaluation, and how far it may be. Exit status 1 if one is further. With --against: two
// archs of the GPU, in a child process each, also compared with each other bit for bit.
#include <iostream>
#include <nlohmann/json.hpp>

#include "arch_run.h"
#include "case_options.h"
#include "checker.h"
#include "commands.h"
#include "device.h"
#include "exit_status.h"
#include "output_file.h"
#include "table.h"
#include "train/status_line.h"

namespace tilemoe::app {
namespace {

using verify::Case;

struct CheckOptions {
  CaseOptions cases;
  DeviceOptions where;
  ArchOption arch;
  std::string against;  // another arch
  int limit_s = 600;
  int64_t repeats = 0;
  bool list = false;
  std::string json_file;
};

void list_cases(const std::vector<Case>& cases, std::ostream& out) {
  Table table({{"case", Table::Align::kLeft}, {"rows"}, {"d"}, {"n"}, {"E"}, {"K"}});
  for (const Case& test_case : cases)
    table.add({test_case.name, std::to_string(test_case.outer_rows()), std::to_string(test_case.d),
               std::to_string(test_case.n), std::to_string(test_case.E),
               std::to_string(test_case.K)});
  table.print(out);
}

// As `python -m tilemoe check` writes it (python/tilemoe/_command/check.py).
void write_json(const CheckOptions& options, Device device, size_t cases,
                const verify::Outcome& outcome) {
  if (options.json_file.empty()) return;
  nlohmann::json all = {
      {"version", tilemoe_version()}, {"device", tilemoe_device_description(to_c(device))},
      {"pass", options.cases.pass},   {"seed", options.cases.seed},
      {"repeats", options.repeats},   {"cases", cases}};
  all.update(nlohmann::json::parse(verify::to_json(outcome)));
  write_file(options.json_file, all.dump(1) + "\n");
}

ArchRun run_one(const CheckOptions& options, const std::string& arch,
                const std::vector<Case>& cases) {
  train::StatusLine status(stderr);
  ArchRun run = run_arch({.arch = arch,
                          .cases = cases,
                          .seed = options.cases.seed,
                          .repeats = options.repeats,
                          .passes = options.cases.passes(),
                          .max_silence = std::chrono::seconds(options.limit_s),
                          .select = why_no_arch,
                          .memory = verify::cuda_memory,
                          .on_case = [&](size_t i) {
                            status.draw({arch + " " + std::to_string(i + 1) + "/" +
                                         std::to_string(cases.size()) + " " + cases[i].name},
                                        static_cast<double>(i) / static_cast<double>(cases.size()));
                          }});
  status.clear();
  if (!run.skipped.empty()) throw std::runtime_error("--arch " + arch + ": " + run.skipped);
  return run;
}

// This process uses no GPU: its children do.
int compare_archs(const CheckOptions& options, const std::string& arch) {
  if (arch.empty()) throw WrongUsage("--against requires --arch");
  if (arch == options.against)
    throw WrongUsage("--against must differ from --arch, got " + arch + " for both");
  std::vector<Case> cases = options.cases.choose(Device::kCuda);
  std::erase_if(cases, [](const Case& one) { return one.too_large; });  // not read back whole
  if (cases.empty())
    throw WrongUsage("--against: the chosen cases are too large to be read back whole");
  check_writable(options.json_file);
  const ArchRun one = run_one(options, arch, cases);
  const ArchRun other = run_one(options, options.against, cases);
  const std::vector<std::string> lines = differences(one, other);
  const size_t compared = tensors_compared(one, other);
  std::cout << one.text() << other.text();
  for (const std::string& line : lines) std::cout << line << "\n";
  std::cout << "\n"
            << one.device << "\n"
            << compared << " tensors compared bit for bit, " << lines.size() << " cases differ\n";
  write_file(options.json_file, nlohmann::json({{"version", tilemoe_version()},
                                                {"pass", options.cases.pass},
                                                {"seed", options.cases.seed},
                                                {"repeats", options.repeats},
                                                {"archs", {one.json(), other.json()}},
                                                {"tensors_compared", compared},
                                                {"differences", lines}})
                                        .dump(1) +
                                    "\n");
  const bool good = compared > 0 && lines.empty() && one.failures.empty() && other.failures.empty();
  return good ? kDone : kFailed;
}

int check_cases(CheckOptions options) {
  const std::string arch = options.arch.name();
  if (!arch.empty() && options.where.device == "cpu")
    throw WrongUsage("--arch requires a GPU, got --device cpu");
  if (!options.against.empty() && !options.list) return compare_archs(options, arch);
  if (!arch.empty()) {
    select_arch(arch);
    options.where.device = "cuda";
  }
  const Device device = options.list ? Device::kCpu : options.where.select();
  const std::vector<Case> cases = options.cases.choose(device);
  if (options.list) {
    list_cases(cases, std::cout);
    return kDone;
  }
  check_writable(options.json_file);
  const verify::Passes passes = options.cases.passes();
  Checker checker(options.cases.seed, options.repeats, verify::memory_of(device), passes);
  train::StatusLine status(stderr);
  for (size_t i = 0; i < cases.size(); ++i) {
    status.draw({std::to_string(i + 1) + "/" + std::to_string(cases.size()) + " " + cases[i].name},
                static_cast<double>(i) / static_cast<double>(cases.size()));
    checker.run(cases[i]);
  }
  status.clear();
  checker.print(std::cout);
  const verify::Outcome& outcome = checker.outcome();
  std::cout << "\n"
            << tilemoe_device_description(to_c(device)) << "\n"
            << cases.size() << " cases, " << checker.tensors() << " tensors"
            << (passes == verify::Passes::kForward ? " of the forward pass, " : ", ")
            << outcome.failures.size() << " failures";
  if (options.repeats > 0) std::cout << ", each case run " << options.repeats << " times";
  if (outcome.refused > 0) std::cout << ", " << outcome.refused << " of them refused";
  std::cout << "\n" << outcome.spoilings << " results were spoiled on purpose";
  if (!outcome.impossible.empty()) std::cout << "; " << outcome.impossible.size() << " cannot be";
  std::cout << "\n";
  for (const std::string& failure : outcome.failures) std::cout << "  " << failure << "\n";
  write_json(options, device, cases.size(), outcome);
  return outcome.failures.empty() ? kDone : kFailed;
}

}  // namespace

void add_check(CLI::App& app, Run& run) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command =
      app.add_subcommand("check", "Compare each tensor of the layer with a float64 reference");
  options->cases.add_to(*command);
  command
      ->add_option("--repeat", options->repeats,
                   "Also run each case N times on a busy device and require equal bits")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  options->arch.add_to(*command, "Run the kernels of this arch");
  command
      ->add_option("--against", options->against,
                   "Also run the cases with this arch, in a separate process, and compare the "
                   "bits with --arch")
      ->check(CLI::IsMember(kArchs));
  add_limit(*command, options->limit_s);
  command->add_flag("--list", options->list, "List the cases and exit");
  command->add_option("--json", options->json_file, "Write the results to this file as JSON");
  options->where.add_to(*command);
  command->callback([&run, options] { run = [options] { return check_cases(*options); }; });
}

}  // namespace tilemoe::app
