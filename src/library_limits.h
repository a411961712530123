// What the library takes, stated once: the checks answer with an error past it, and `tilemoe info`
// prints it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilemoe::limits {

inline constexpr int64_t kWidthMultiple = 8;         // d, n: a 16-bit row is a multiple of 16 bytes
inline constexpr int64_t kMaxWidth = INT32_MAX / 4;  // d, n
inline constexpr int64_t kMaxRows = INT32_MAX;       // T, pairs, capacity, m: int32 on the device
inline constexpr int64_t kMaxExperts = INT32_MAX - 1;         // E: E + 1 offsets
inline constexpr size_t kAlignment = 16;                      // pointers and strides, in bytes
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 62;  // of one tensor
inline constexpr int kMaxThreads = 4096;
inline constexpr int kMaxBlockTurns = 16;

}  // namespace tilemoe::limits
