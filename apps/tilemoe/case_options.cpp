#include "case_options.h"

#include "exit_status.h"

namespace tilemoe::app {

using verify::Case;

void CaseOptions::add_to(CLI::App& command) {
  command.add_option("case,--case", selection.patterns,
                     "Cases to run: names or patterns such as 'rounded-*' (default: all)");
  command.add_option("--dtype", selection.dtype, "Only the cases of this dtype")
      ->check(CLI::IsMember({"all", "float32", "bfloat16", "float16"}))
      ->capture_default_str();
  command.add_option("--pass", pass, "Passes to run: forward, or all (forward and backward)")
      ->check(CLI::IsMember({"forward", "all"}))
      ->capture_default_str();
  command.add_flag("--reduced", selection.reduced,
                   "Only a short list of cases that together run every kernel");
  command.add_option("--seed", seed, "Random seed")->capture_default_str();
}

std::vector<Case> CaseOptions::choose(Device device) const {
  const std::vector<Case> cases = selection.choose(device);
  const std::string wrong = selection.complaint(cases, "tilemoe check --list");
  if (!wrong.empty()) throw WrongUsage(wrong);
  return cases;
}

verify::Passes CaseOptions::passes() const {
  return pass == "forward" ? verify::Passes::kForward : verify::Passes::kAll;
}

}  // namespace tilemoe::app
