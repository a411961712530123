// How TMA and wgmma permute the 16-byte chunks of shared memory.
#pragma once

#include <cstdint>

namespace tilemoe::simulator {

// The bytes of the spans that chunks are permuted within.
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

// The address, with the swizzle, of what lies at `address` without it: the number of the chunk in
// its span is combined with the number of the 128 bytes, modulo the chunks of a span. It depends on
// the address alone, not on where the matrix begins.
constexpr uint32_t swizzled(Swizzle swizzle, uint32_t address) {
  const uint32_t chunks = swizzle_span(swizzle) / 16;
  return address ^ ((address >> 7 & (chunks - 1)) << 4);
}

}  // namespace tilemoe::simulator
