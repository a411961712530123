// How TMA and wgmma permute the 16-byte chunks of shared memory.
#pragma once

#include <cstdint>

namespace tilemoe::simulator {

// Within spans of so many bytes.
enum class Swizzle { kNone, k32, k64, k128 };

constexpr uint32_t swizzle_span(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::kNone: return 16;
    case Swizzle::k32: return 32;
    case Swizzle::k64: return 64;
    case Swizzle::k128: return 128;
  }
  return 0;
}

// Bytes after which the pattern repeats: what shared memory must be aligned to for a matrix to
// begin where a pattern does.
constexpr uint32_t swizzle_period(Swizzle swizzle) {
  return swizzle == Swizzle::kNone ? 16 : 8 * swizzle_span(swizzle);
}

// Where in shared memory lies what would lie at `address` without the swizzle: the number of the
// chunk in its span changes by the number of the 128 bytes, as far as the span has chunks. It is of
// the address itself, wherever the matrix begins.
constexpr uint32_t swizzled(Swizzle swizzle, uint32_t address) {
  const uint32_t chunks = swizzle_span(swizzle) / 16;
  return address ^ ((address >> 7 & (chunks - 1)) << 4);
}

}  // namespace tilemoe::simulator
