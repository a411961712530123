#include "case_options.h"

#include "exit_status.h"
#include "verify/patterns.h"
#include "verify/registry.h"

namespace tilemoe::app {

using verify::Case;

void CaseOptions::add_to(CLI::App& command) {
  command.add_option("case", patterns,
                     "Cases to run: names or patterns such as 'rounded-*'; without them all");
  command.add_option("--dtype", dtype, "Only the cases of this type")
      ->check(CLI::IsMember({"all", "float32", "bfloat16", "float16"}))
      ->capture_default_str();
  command.add_option("--pass", pass, "What to run: forward, or all with backward")
      ->check(CLI::IsMember({"forward", "all"}))
      ->capture_default_str();
  command.add_flag("--reduced", reduced,
                   "Only the quick cases that together run every kernel, for slow tools");
  command.add_option("--seed", seed, "Seed of the random numbers")->capture_default_str();
}

bool CaseOptions::match(const Case& test_case) const {
  if (dtype != "all" && dtype != tilemoe_dtype_name(to_c(test_case.dtype))) return false;
  return verify::matches_any(patterns, test_case.name);
}

std::vector<Case> CaseOptions::choose(Device device) const {
  std::vector<Case> cases;
  for (const Case& test_case : verify::verification_cases())
    if (match(test_case) && (test_case.reduced || !reduced)) cases.push_back(test_case);
  for (const Case& huge : verify::huge_cases())  // tens of gigabytes: by their full name only
    for (const std::string& pattern : patterns)
      if (pattern == huge.name) cases.push_back(huge);
  if (device == Device::kCuda && dtype == "all")
    std::erase_if(cases, [](const Case& one) { return one.dtype == DType::kFloat32; });
  const std::string wrong = verify::no_match(patterns, cases, &Case::name, "tilemoe check --list");
  if (!wrong.empty()) throw WrongUsage(wrong);
  return cases;
}

verify::Passes CaseOptions::passes() const {
  return pass == "forward" ? verify::Passes::kForward : verify::Passes::kAll;
}

}  // namespace tilemoe::app
