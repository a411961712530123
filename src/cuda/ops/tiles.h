// The tiles that the kernels of mma.sync are made for: as wide as a warp's registers allow, and
// shorter ones for experts of few rows.
#pragma once

#include "cuda/core/variant.h"

namespace tilemoe::cuda {

inline constexpr TileConfiguration kWarps256{128, 256};
inline constexpr TileConfiguration kWarps192{128, 192};
inline constexpr TileConfiguration kWarps128{128, 128};
inline constexpr TileConfiguration kSmallM64{64, 128};
inline constexpr TileConfiguration kSmallM16{16, 64};

// The tiles that Hopper's kernels are made for.

inline constexpr TileConfiguration kCooperative256{128, 256, Schedule::kCooperative};
inline constexpr TileConfiguration kCluster256{128, 256, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kCluster192{128, 192, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kPingPong128{128, 128, Schedule::kPingPong};
inline constexpr TileConfiguration kPingPong64{64, 64, Schedule::kPingPong};  // for few rows

// The tiles that Blackwell's kernels are made for: the widest of an instruction, and the other width
// that the reference tiles of weight gradients have; and the widest, by pairs of blocks.

inline constexpr TileConfiguration kTensorMemory256{128, 256};
inline constexpr TileConfiguration kTensorMemory192{128, 192};
inline constexpr TileConfiguration kTensorMemory2Cta{128, 256, Schedule::kCooperative, 2};

}  // namespace tilemoe::cuda
