// Which tile a projection uses. The candidates are the tiles that its kernels are built for; each
// is scored by a model of the time it takes.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/core/tile_configuration.h"
#include "cuda/schedule/device_model.h"

namespace tilemoe::cuda {

// A projection as the model sees it; the counts of experts' rows are on the device, so rows are
// taken as if every pair had chosen at random.
struct ProjectionSize {
  int64_t rows, E;
  int64_t columns;           // of the product
  int64_t sum;               // d or n
  double epilogue_a_column;  // cycles of a consumer for 64 rows of one column
  bool gathers = false;      // rows of A come by threads' copies
};

// One of `from`, which is not empty.
TileConfiguration choose_tile(const ProjectionSize& size, std::span<const TileConfiguration> from,
                              const DeviceModel& device);

}  // namespace tilemoe::cuda
