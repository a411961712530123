#include "cuda/schedule/configuration.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tilemoe::cuda {
namespace {

std::optional<TileConfiguration> forced;
std::optional<int32_t> forced_group;
bool forced_early = false;

int64_t blocks(int64_t size, int64_t block) {
  return (size + block - 1) / block;
}

// Whether blocks of 192 columns waste so many fewer than blocks of 256 that it makes up for what
// they do slower. Of the input gradient they took 7 and 13 % longer where neither wastes any, 5 %
// less where 256 wastes a fifteenth.
bool narrow_blocks_pay(int64_t columns) {
  return 20 * 192 * blocks(columns, 192) <= 19 * 256 * blocks(columns, 256);
}

// Cycles of the whole product. An SM multiplies 2048 pairs a cycle, and gets 44 bytes a cycle from
// the L2, 12 of them from memory, less where several blocks ask for the same of B at a time. A
// cooperative tile's epilogue is exposed, that of ping-pong runs beside the other consumer's
// products. A cluster's blocks read B once where they have row blocks of one expert, but wait for
// each other: longest where rows are gathered. The numbers are fitted to what `tilemoe_cuda_steps
// --configurations` measured on an H100.
double cycles(const ProjectionSize& size, const TileConfiguration& tile, int multiprocessors) {
  constexpr double kPairsACycle = 2048, kL2Bytes = 44, kMemoryBytes = 12;
  constexpr double kTileOverhead = 300, kPingPongOverhead = 450, kAskedTwice = 0.1;
  if (tile.block_n == 192 && !narrow_blocks_pay(size.columns))
    return std::numeric_limits<double>::infinity();
  const int64_t rows_an_expert = blocks(size.rows, size.E);
  const int64_t row_blocks = blocks(rows_an_expert, tile.block_m);
  const int64_t tiles = size.E * row_blocks * blocks(size.columns, tile.block_n);
  const double products = static_cast<double>(tile.block_m) * tile.block_n *
                          static_cast<double>(blocks(size.sum, 64) * 64) / kPairsACycle;
  const double epilogue = size.epilogue_a_column * tile.block_n * tile.block_m / 64;
  const double alone = row_blocks == 0 ? 1.0
                                       : static_cast<double>(row_blocks % tile.cluster) /
                                             static_cast<double>(row_blocks);
  const double b_read = alone + (1 - alone) / tile.cluster;
  const double loads = static_cast<double>(blocks(size.sum, 64)) *
                       (tile.block_m + b_read * tile.block_n) * 128 / kL2Bytes;
  // Each operand once; gathered rows are few beside the weights.
  const double operands =
      2.0 * static_cast<double>(size.sum) *
      static_cast<double>(size.E * size.columns + (size.gathers ? 0 : size.rows));
  const double memory = tiles == 0 ? 0
                                   : operands / static_cast<double>(tiles) / kMemoryBytes *
                                         (1 + kAskedTwice * b_read);
  const double wait = tile.cluster == 1 ? 0 : size.gathers ? 2600 : 300;
  const double main = std::max(std::max(products, loads) + wait, memory);
  const double tile_time = tile.schedule == Schedule::kPingPong
                               ? std::max(main, epilogue / 2) + kPingPongOverhead
                               : main + epilogue / 2 + kTileOverhead;
  const double waves = static_cast<double>(tiles) / multiprocessors;
  // A last wave that is not full costs a whole one, if there are few.
  const double rounded = waves < 8 ? std::ceil(waves) : waves + 0.5;
  return rounded * tile_time;
}

}  // namespace

TileConfiguration choose_tile(const ProjectionSize& size, std::span<const TileConfiguration> from,
                              int multiprocessors) {
  if (forced && std::find(from.begin(), from.end(), *forced) != from.end()) return *forced;
  return *std::min_element(from.begin(), from.end(), [&](const auto& a, const auto& b) {
    return cycles(size, a, multiprocessors) < cycles(size, b, multiprocessors);
  });
}

int column_block(int64_t columns) {
  if (forced && (forced->block_n == 256 || forced->block_n == 192)) return forced->block_n;
  return narrow_blocks_pay(columns) ? 192 : 256;
}

void force_tile(std::optional<TileConfiguration> tile) {
  forced = tile;
}

int32_t column_group() {
  return forced_group.value_or(kColumnGroup);
}

void force_column_group(std::optional<int32_t> blocks) {
  forced_group = blocks;
}

bool early_steps() {
  return forced_early;
}

void force_early_steps(bool early) {
  forced_early = early;
}

}  // namespace tilemoe::cuda
