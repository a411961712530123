// The cases of low-rank adapters.
#pragma once

#include <vector>

#include "case.h"

namespace tilemoe::verify {

std::vector<Case> lora_cases();

}  // namespace tilemoe::verify
