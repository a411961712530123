#include "verification.h"

#include "verify/json_text.h"
#include "verify/outcome.h"
#include "verify/registry.h"
#include "verify/selection.h"

namespace tilemoe_torch {
namespace {

tilemoe::Device device_of(const Call& call) {
  return static_cast<tilemoe::Device>(call.device());
}

}  // namespace

std::string device_description(const Tensor& like) {
  const Call call({{"like", like}});
  return tilemoe_device_description(call.device());
}

std::string verification_cases(const Tensor& like, const std::vector<std::string>& patterns,
                               std::string dtype, bool reduced) {
  const Call call({{"like", like}});
  const tilemoe::verify::Selection selection{
      .patterns = patterns, .dtype = std::move(dtype), .reduced = reduced};
  const auto cases = selection.choose(device_of(call));
  return "{\"cases\": " + tilemoe::verify::to_json(cases) + ", \"complaint\": " +
         tilemoe::verify::json_text(selection.complaint(cases, "tilemoe check --list")) + "}";
}

std::string verify_case(const Tensor& like, std::string name, int64_t seed, int64_t repeats,
                        bool backward) {
  namespace verify = tilemoe::verify;
  const Call call({{"like", like}});
  const verify::Case* const found = verify::find_case(name);
  if (!found) refuse("name must be a case of the registry, got " + name);
  return verify::to_json(verify::run_case(
      *found, static_cast<uint64_t>(seed), repeats, verify::memory_of(device_of(call)),
      backward ? verify::Passes::kAll : verify::Passes::kForward));
}

}  // namespace tilemoe_torch
