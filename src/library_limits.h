// What the library takes, stated once: the checks answer with an error past it, and `tilemoe info`
// prints it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tilemoe/tilemoe.h"

namespace tilemoe::limits {

inline constexpr int64_t kWidthMultiple = 8;  // d, n: a 16-bit row is a multiple of 16 bytes
inline constexpr int64_t kMaxWidth = int64_t{1} << 24;  // d, n: no grid of blocks is too tall
// T, pairs, capacity: int32 on the device. A tensor map holds fewer (cuda/core/tensor_map.h).
inline constexpr int64_t kMaxRows = INT32_MAX;
inline constexpr int64_t kMaxRowsCuda = (int64_t{1} << 30) - 1;
// Strides of X, dO, weights and their gradients on CUDA: rows in 32 bits of bytes, since an address is
// one multiplication; experts as TMA takes them.
inline constexpr int64_t kMaxRowStrideBytesCuda = UINT32_MAX;
inline constexpr int64_t kMaxExpertStrideBytesCuda = (int64_t{1} << 40) - 1;
inline constexpr int64_t kMaxMultiple = INT32_MAX;            // m
inline constexpr int64_t kMaxExperts = INT32_MAX - 1;         // E: E + 1 offsets
inline constexpr size_t kAlignment = 16;                      // pointers and strides, in bytes
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 62;  // of one tensor
inline constexpr int kMaxThreads = 4096;
inline constexpr int kMaxBlockTurns = 16;

inline int64_t max_rows(tilemoe_device device) {
  return device == TILEMOE_CUDA ? kMaxRowsCuda : kMaxRows;
}

}  // namespace tilemoe::limits
