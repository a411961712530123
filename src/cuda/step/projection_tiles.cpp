#include "cuda/step/projection_tiles.h"

#include "cuda/device.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

TileConfiguration tile_of(const UpProjection& step) {
  return choose_tile({.rows = step.rows.capacity,
                      .E = step.rows.E,
                      .columns = 2 * step.experts->n,
                      .sum = step.experts->d,
                      .epilogue_a_column = 8,
                      .gathers = step.rows.token != nullptr},
                     kUpTiles, current_device().multiprocessors);
}

TileConfiguration tile_of(const DownProjection& step) {
  return choose_tile({.rows = step.rows.capacity,
                      .E = step.rows.E,
                      .columns = step.Y.shape[1],
                      .sum = step.experts->n,
                      .epilogue_a_column = 4},
                     kDownTiles, current_device().multiprocessors);
}

TileConfiguration tile_of(const InputGradient& step) {
  return choose_tile({.rows = step.rows.capacity,
                      .E = step.rows.E,
                      .columns = step.dX_rows.shape[1],
                      .sum = step.dH.shape[1],
                      .epilogue_a_column = 4},
                     kInputTiles, current_device().multiprocessors);
}

int64_t ds_tiles(const tilemoe_experts& experts) {
  const int columns = column_block(experts.n);
  return (experts.n + columns - 1) / columns;
}

TileConfiguration tile_of(const ActivationGradient& step) {
  if (column_block(step.experts->n) == kCooperative192Pairs.block_n) return kCooperative192Pairs;
  return choose_tile({.rows = step.rows.capacity,
                      .E = step.rows.E,
                      .columns = step.experts->n,
                      .sum = step.experts->d,
                      .epilogue_a_column = 44,
                      .gathers = true},
                     kActivationGradientTiles, current_device().multiprocessors);
}

}  // namespace tilemoe::cuda
