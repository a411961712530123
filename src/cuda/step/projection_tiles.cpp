#include "cuda/step/projection_tiles.h"

#include "cuda/core/device.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

TileConfiguration tile_of(const UpProjection& step) {
  return choose_tile(size_of(step), kUpTiles, current_device().multiprocessors);
}

TileConfiguration tile_of(const DownProjection& step) {
  return choose_tile(size_of(step), kDownTiles, current_device().multiprocessors);
}

TileConfiguration tile_of(const InputGradient& step) {
  return choose_tile(size_of(step), kInputTiles, current_device().multiprocessors);
}

int64_t ds_tiles(const tilemoe_experts& experts) {
  const int columns = column_block(experts.n);
  return (experts.n + columns - 1) / columns;
}

TileConfiguration tile_of(const ActivationGradient& step) {
  if (column_block(step.experts->n) == kCooperative192Cluster.block_n)
    return kCooperative192Cluster;
  return choose_tile(size_of(step), kActivationGradientTiles, current_device().multiprocessors);
}

}  // namespace tilemoe::cuda
