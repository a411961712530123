// Which tile a projection takes of those that it has kernels for: the up-projection of plain SwiGLU
// in bfloat16 with W1 contiguous along d, and any down-projection with W2 contiguous along n. All
// others have one.
#pragma once

#include "backend.h"
#include "cuda/schedule/configuration.h"

namespace tilemoe::cuda {

inline constexpr TileConfiguration kUpTiles[] = {kCooperative256, kCooperative256Pairs};
inline constexpr TileConfiguration kDownTiles[] = {kCooperative256, kCooperative256Pairs,
                                                   kPingPong128};

TileConfiguration tile_of(const UpProjection& step);
TileConfiguration tile_of(const DownProjection& step);

}  // namespace tilemoe::cuda
