// What rows are gathered from: row r of an expert is row token[r] of the source, or row r itself
// where there is no token list.
#pragma once

#include <cstdint>

#include "backend.h"
#include "check.h"

namespace tilemoe::cuda {

struct GatherSource {
  const void* source;    // (T, width)
  uint32_t row_bytes;    // from one row to the next
  int32_t width_bytes;   // of a row
  const int32_t* token;  // (capacity) or null
};

// The rows of `source` that the routing names. From one to the next 32 bits of bytes, so that an
// address is one multiplication.
inline GatherSource gather_source(const tilemoe_tensor& source, const Rows& rows) {
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(source.dtype));
  const int64_t bytes = source.shape[0] > 1 ? source.stride[0] * element : 0;
  TILEMOE_ASSERT(bytes >= 0 && bytes <= UINT32_MAX,  // call_limits.h
                 "rows of " << bytes << " bytes are too far apart to be gathered");
  return {.source = source.data,
          .row_bytes = static_cast<uint32_t>(bytes),
          .width_bytes = static_cast<int32_t>(source.shape[1] * element),
          .token = rows.token};
}

}  // namespace tilemoe::cuda
