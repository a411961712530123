// A layer too large for a whole reference, judged by a small one that is hidden in it: tokens and
// experts spread from the first to the last, which have to do with each other alone, while a crowd
// fills the rest. What the small layer's tokens and experts get is compared as in any other case.
#pragma once

#include "check.h"

namespace tilemoe::verify {

// `large` routes by triples (general routing), K for each token of the crowd, and has no biases.
Report check_large(const Case& large, uint64_t seed, Memory& memory, Passes passes);

}  // namespace tilemoe::verify
