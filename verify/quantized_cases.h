// Cases of the registry whose experts have quantised weights.
#pragma once

#include <vector>

#include "case.h"

namespace tilemoe::verify {

std::vector<Case> quantized_cases();

}  // namespace tilemoe::verify
