// A layer too large for a whole reference, checked by a small layer hidden in it: tokens and
// experts spread from the first to the last that are routed only to each other, while a crowd fills
// the rest. The small layer's outputs are compared as in any other case.
#pragma once

#include "check.h"

namespace tilemoe::verify {

// `large` routes by triples (general routing), K for each token of the crowd, and has no biases.
Report check_large(const Case& large, uint64_t seed, Memory& memory, Passes passes);

}  // namespace tilemoe::verify
