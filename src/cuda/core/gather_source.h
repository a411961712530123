// What rows are gathered from: row r of an expert is row token[r] of the source, or row r itself
// where there is no token list.
#pragma once

#include <cstdint>

namespace tilemoe::cuda {

struct GatherSource {
  const void* source;    // (T, width)
  uint32_t row_bytes;    // from one row to the next
  int32_t width_bytes;   // of a row
  const int32_t* token;  // (capacity) or null
};

}  // namespace tilemoe::cuda
