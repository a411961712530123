// `tilemoe check`: runs the verification cases on a backend and prints how far each tensor is from
// a float64 evaluation, and how far it may be. Exit status 1 where one is further.
#include <fnmatch.h>

#include <iostream>
#include <stdexcept>

#include "checker.h"
#include "commands.h"
#include "device.h"
#include "exit_status.h"
#include "table.h"
#include "train/status_line.h"
#include "verify/registry.h"

namespace tilemoe::app {
namespace {

using verify::Case;

struct CheckOptions {
  DeviceOptions where;
  std::vector<std::string> patterns;
  std::string dtype = "all";
  std::string pass = "all";
  uint64_t seed = 1;
  int64_t repeats = 0;
  bool reduced = false;
  bool list = false;
};

bool matches(const Case& test_case, const CheckOptions& options) {
  if (options.dtype != "all" && options.dtype != tilemoe_dtype_name(to_c(test_case.dtype)))
    return false;
  if (options.patterns.empty()) return true;
  const std::string& name = test_case.name;
  const std::string without_dtype = name.substr(0, name.rfind('/'));
  for (const std::string& pattern : options.patterns)
    if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0 ||
        fnmatch(pattern.c_str(), without_dtype.c_str(), 0) == 0)
      return true;
  return false;
}

// float32 is for the CPU alone, so a GPU is asked for it by --dtype only.
std::vector<Case> chosen_cases(const CheckOptions& options, Device device) {
  std::vector<Case> cases;
  for (const Case& test_case : verify::verification_cases())
    if (matches(test_case, options) && (test_case.reduced || !options.reduced))
      cases.push_back(test_case);
  for (const Case& huge : verify::huge_cases())  // tens of gigabytes: by their full name only
    for (const std::string& pattern : options.patterns)
      if (pattern == huge.name) cases.push_back(huge);
  if (device == Device::kCuda && options.dtype == "all")
    std::erase_if(cases, [](const Case& one) { return one.dtype == DType::kFloat32; });
  if (cases.empty()) throw WrongUsage("no case matches; `tilemoe check --list` names them all");
  return cases;
}

void list_cases(const std::vector<Case>& cases, std::ostream& out) {
  Table table({{"case", Table::Align::kLeft}, {"rows"}, {"d"}, {"n"}, {"E"}, {"K"}});
  for (const Case& test_case : cases)
    table.add({test_case.name, std::to_string(test_case.outer_rows()), std::to_string(test_case.d),
               std::to_string(test_case.n), std::to_string(test_case.E),
               std::to_string(test_case.K)});
  table.print(out);
}

int check_cases(const CheckOptions& options) {
  const Device device = options.list ? Device::kCpu : options.where.select();
  const std::vector<Case> cases = chosen_cases(options, device);
  if (options.list) {
    list_cases(cases, std::cout);
    return 0;
  }
  const auto passes = options.pass == "forward" ? verify::Passes::kForward : verify::Passes::kAll;
  Checker checker(options.seed, options.repeats, verify::memory_of(device), passes);
  train::StatusLine status(stderr);
  for (size_t i = 0; i < cases.size(); ++i) {
    status.draw({std::to_string(i + 1) + "/" + std::to_string(cases.size()) + " " + cases[i].name},
                static_cast<double>(i) / static_cast<double>(cases.size()));
    checker.run(cases[i]);
  }
  status.clear();
  checker.print(std::cout);
  std::cout << "\n"
            << tilemoe_device_description(to_c(device)) << "\n"
            << cases.size() << " cases, " << checker.tensors() << " tensors"
            << (passes == verify::Passes::kForward ? " of the forward pass alone, " : ", ")
            << checker.failures().size() << " failures";
  if (options.repeats > 0) std::cout << ", each case run " << options.repeats << " times";
  if (checker.refused() > 0) std::cout << ", " << checker.refused() << " of them refused";
  std::cout << "\n" << checker.spoilings() << " results were spoiled on purpose";
  if (!checker.impossible().empty())
    std::cout << "; " << checker.impossible().size() << " cannot be";
  std::cout << "\n";
  for (const std::string& failure : checker.failures()) std::cout << "  " << failure << "\n";
  return checker.failures().empty() ? 0 : 1;
}

}  // namespace

void add_check(CLI::App& app, Run& run) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command =
      app.add_subcommand("check", "Compare the layer with a float64 evaluation, tensor by tensor");
  command->add_option("case", options->patterns,
                      "Cases to run: names or patterns such as 'rounded-*'; without them all");
  command->add_option("--dtype", options->dtype, "Only the cases of this type")
      ->check(CLI::IsMember({"all", "float32", "bfloat16", "float16"}))
      ->capture_default_str();
  command
      ->add_option("--pass", options->pass, "What to run and judge: forward, or all with backward")
      ->check(CLI::IsMember({"forward", "all"}))
      ->capture_default_str();
  command->add_flag("--reduced", options->reduced,
                    "Only the quick cases that together run every kernel, for slow tools");
  command
      ->add_option("--repeat", options->repeats,
                   "Also run each case this often on a busy device: the bits must stay the same")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the random numbers")->capture_default_str();
  command->add_flag("--list", options->list, "List the cases and do nothing else");
  options->where.add_to(*command);
  command->callback([&run, options] { run = [options] { return check_cases(*options); }; });
}

}  // namespace tilemoe::app
