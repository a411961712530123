// The tiles that Blackwell's kernels are made for: the widest of an instruction, and the other width
// that the reference tiles of weight gradients have; and the widest, by pairs of blocks.
#pragma once

#include "cuda/core/tile_configuration.h"

namespace tilemoe::cuda {

inline constexpr TileConfiguration kTensorMemory256{128, 256};
inline constexpr TileConfiguration kTensorMemory192{128, 192};
inline constexpr TileConfiguration kTensorMemoryPair{128, 256, Schedule::kCooperative, 2};

}  // namespace tilemoe::cuda
