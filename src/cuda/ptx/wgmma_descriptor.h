// The word by which wgmma finds an operand in shared memory (PTX ISA, "Asynchronous Warpgroup Level
// Matrix Shared Memory Layout"). Plain arithmetic, for the host too: tests/descriptors_test.cpp holds
// it to CUTLASS's.
#pragma once

#include <cstdint>

#include "routing/host_device.h"

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

}  // namespace tilemoe::cuda::ptx
