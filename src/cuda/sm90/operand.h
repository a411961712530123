// A staged operand as wgmma reads it: by descriptors.
#pragma once

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::cuda::sm90 {

template <Major kMajor_, int kRows_>
struct Operand : StagedOperand<kMajor_, kRows_> {
  using Staged = StagedOperand<kMajor_, kRows_>;

  __device__ static uint64_t descriptor(uint32_t shared) {
    return ptx::wgmma_descriptor(shared, Staged::kAtomBytes,
                                 kMajor_ == Major::kK ? 16 : Staged::kChunkBytes);
  }
  // A descriptor moved by `bytes`, which never leave its 18 bits of address.
  __device__ static uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
  }
};

}  // namespace tilemoe::cuda::sm90
