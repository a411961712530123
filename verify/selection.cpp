#include "selection.h"

#include "json_text.h"
#include "patterns.h"
#include "registry.h"

namespace tilemoe::verify {

bool Selection::match(const Case& test_case) const {
  if (dtype != "all" && dtype != tilemoe_dtype_name(to_c(test_case.dtype))) return false;
  return matches_any(patterns, test_case.name);
}

std::vector<Case> Selection::choose(Device device) const {
  std::vector<Case> cases;
  for (const Case& test_case : verification_cases())
    if (match(test_case) && (test_case.reduced || !reduced)) cases.push_back(test_case);
  for (const Case& huge : huge_cases())  // tens of gigabytes
    for (const std::string& pattern : patterns)
      if (pattern == huge.name) cases.push_back(huge);
  if (device == Device::kCuda && dtype == "all")
    std::erase_if(cases, [](const Case& one) { return one.dtype == DType::kFloat32; });
  if (device == Device::kCuda)
    std::erase_if(cases, [](const Case& one) { return !arch_computes(tilemoe_cuda_arch(), one); });
  return cases;
}

std::string Selection::complaint(const std::vector<Case>& chosen, const std::string& list) const {
  return no_match(patterns, chosen, &Case::name, list);
}

std::string to_json(const std::vector<Case>& cases) {
  return json_list(cases, [](const Case& one) {
    return "{\"case\": " + json_text(one.name) + ", \"rows\": " + std::to_string(one.outer_rows()) +
           ", \"d\": " + std::to_string(one.d) + ", \"n\": " + std::to_string(one.n) +
           ", \"E\": " + std::to_string(one.E) + ", \"K\": " + std::to_string(one.K) + "}";
  });
}

}  // namespace tilemoe::verify
