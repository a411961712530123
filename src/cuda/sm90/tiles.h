// The tiles that Hopper's kernels are made for.
#pragma once

#include "cuda/core/tile_configuration.h"

namespace tilemoe::cuda {

inline constexpr TileConfiguration kCooperative256{128, 256, Schedule::kCooperative};
inline constexpr TileConfiguration kCluster256{128, 256, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kCluster192{128, 192, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kPingPong128{128, 128, Schedule::kPingPong};
inline constexpr TileConfiguration kPingPong64{64, 64, Schedule::kPingPong};  // for few rows

}  // namespace tilemoe::cuda
