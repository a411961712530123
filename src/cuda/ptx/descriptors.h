// The descriptors of wgmma and tcgen05.mma. Plain arithmetic, for the host too; the tests compare
// them with those of CUTLASS (tests/descriptors_test.cpp).
//
// wgmma: an operand in shared memory (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory
// Layout").
#pragma once

#include <cstdint>

#include "core/numbers.h"
#include "cuda/core/variant.h"

namespace tilemoe::cuda::ptx {

// A matrix in shared memory in atoms of 8 rows of 128 bytes, swizzled, 1024 bytes each. K-major:
// `group_stride` is the distance between groups of 8 rows, `chunk_stride` is unused. MN-major:
// `group_stride` is the distance between groups of 8 steps of the sum,
// `chunk_stride` that between chunks of 64 rows. In bytes; `shared` is on 1024 but for steps inside
// an atom.
TILEMOE_HOST_DEVICE constexpr uint64_t wgmma_descriptor(uint32_t shared, uint32_t group_stride,
                                                        uint32_t chunk_stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(group_stride >> 4) << 32 |
         static_cast<uint64_t>(chunk_stride >> 4) << 16 | ((shared & 0x3ffff) >> 4);
}

// tcgen05.mma of 16-bit operands (PTX ISA, "Instruction descriptor" and "Shared memory descriptor"
// of tcgen05).

enum class MmaFormat : uint32_t { kF16 = 0, kBF16 = 1 };

// D (m, n) in float32 of A (m, 16) and B (n, 16): dense, neither negated nor shifted.
TILEMOE_HOST_DEVICE constexpr uint32_t tcgen05_instruction(MmaFormat format, uint32_t m, uint32_t n,
                                                           Major a_major, Major b_major) {
  constexpr uint32_t kFloat32 = 1;
  const auto major = [](Major of) { return of == Major::kMN ? 1u : 0u; };
  return kFloat32 << 4 |                                                 // [4, 6): of D
         static_cast<uint32_t>(format) << 7 |                            // [7, 10): of A
         static_cast<uint32_t>(format) << 10 |                           // [10, 13): of B
         major(a_major) << 15 | major(b_major) << 16 | (n >> 3) << 17 |  // [17, 23)
         (m >> 4) << 24;                                                 // [24, 29)
}

// A matrix in shared memory in atoms of 8 rows of 128 bytes, swizzled, 1024 bytes each. K-major:
// `group_stride` is the distance between groups of 8 rows, `chunk_stride` is unused. MN-major:
// `group_stride` is the distance between groups of 8 steps of the sum, `chunk_stride` that between
// chunks of 64 rows. In bytes; `shared` is on 1024 but for steps inside an atom.
TILEMOE_HOST_DEVICE constexpr uint64_t tcgen05_descriptor(uint32_t shared, uint32_t group_stride,
                                                          uint32_t chunk_stride) {
  constexpr uint64_t kVersion = uint64_t{1} << 46;     // [46, 48): Blackwell's
  constexpr uint64_t kSwizzle128 = uint64_t{2} << 61;  // [61, 64)
  return kSwizzle128 | kVersion | static_cast<uint64_t>(group_stride >> 4) << 32 |
         static_cast<uint64_t>(chunk_stride >> 4) << 16 | ((shared & 0x3ffff) >> 4);
}

}  // namespace tilemoe::cuda::ptx
