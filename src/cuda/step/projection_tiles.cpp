#include "cuda/step/projection_tiles.h"

#include "cuda/core/device.h"

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

TileConfiguration tile_of(const ActivationGradient& step) {
  return choose_tile(size_of(step), kActivationGradientTiles, current_device().multiprocessors);
}

}  // namespace tilemoe::cuda
