// The tiles that the kernels of mma.sync are made for: as wide as a warp's registers allow, and
// shorter ones for experts of few rows.
#pragma once

#include "cuda/core/tile_configuration.h"

namespace tilemoe::cuda {

inline constexpr TileConfiguration kWarps256{128, 256};
inline constexpr TileConfiguration kWarps192{128, 192};
inline constexpr TileConfiguration kWarps128{128, 128};
inline constexpr TileConfiguration kFewRows64{64, 128};
inline constexpr TileConfiguration kFewRows16{16, 64};

}  // namespace tilemoe::cuda
