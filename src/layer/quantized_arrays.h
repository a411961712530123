// The arrays of a quantised weight: their sizes by format, checked.
#pragma once

#include <cstdint>

#include "core/overlap.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

// The values of a quantised weight, in the order of its codes.
struct Values {
  int64_t E, R, C;
};

// Throws unless the weight has all arrays of its format, and these values fit it.
void check_weight(const char* name, const tilemoe_quantized& weight, const Values& values);
void read_arrays(MemoryUse& memory, const char* name, const tilemoe_quantized& weight,
                 const Values& values);

}  // namespace tilemoe
