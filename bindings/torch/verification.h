// The repository's verification code (verify/), for `python -m tilemoe check` and `doctor`. `like`
// is any tensor on the device to check. All return text.
#pragma once

#include <string>
#include <vector>

#include "call.h"

namespace tilemoe_torch {

// As the library describes it.
std::string device_description(const Tensor& like);
// {"cases": [...], "complaint": ""}, of verify::Selection
std::string verification_cases(const Tensor& like, const std::vector<std::string>& patterns,
                               std::string dtype, bool reduced);
// JSON of verify::Outcome.
std::string verify_case(const Tensor& like, std::string name, int64_t seed, int64_t repeats,
                        bool backward);

}  // namespace tilemoe_torch
