#include "cuda/gemm/schedule/cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/gemm/schedule/splits.h"

namespace tilemoe::cuda {
namespace {

int64_t blocks(int64_t size, int64_t block) {
  return (size + block - 1) / block;
}

// The part of the experts that have rows, blocks of rows that an expert has on average, and the
// part of these that find no partner in a cluster.
struct RowBlocks {
  double touched, of_an_expert, alone;
};

// The counts of rows are on the device. The model assumes that every pair chose at random: the
// variance of a count is its mean, so if the mean is a whole number of blocks, half of the experts
// have one more.
RowBlocks expected_row_blocks(double rows_an_expert, const TileConfiguration& tile) {
  constexpr double kNegligible = 1e-6;
  const double spread = std::sqrt(2 * rows_an_expert);
  const auto share_above = [&](double rows) {
    return 0.5 * std::erfc((rows + 0.5 - rows_an_expert) / spread);
  };
  RowBlocks found{};
  if (rows_an_expert <= 0) return found;
  found.touched = -std::expm1(-rows_an_expert);
  double share = found.touched;  // of experts with at least `count` blocks
  for (int count = 1; count == 1 || share > kNegligible; ++count) {
    const double more = std::min(share, share_above(double{1} * count * tile.block_m));
    found.of_an_expert += (share - more) * count;
    found.alone += (share - more) * (count % tile.cluster);
    share = more;
  }
  found.alone = tile.cluster == 1 ? 1 : found.alone / found.of_an_expert;
  return found;
}

// Row blocks of an expert with rows, up to which all are said to have one.
constexpr double kOneBlock = 1.1;

// What L2 delivers for a row's part of 128 bytes, in multiples of them. It delivers sectors of 32
// bytes. If every other row begins within a sector, every other part lies in five sectors and in two
// lines; fitted to off-tiles (rows of 2320 bytes).
double l2_parts(int64_t row_elements) {
  constexpr int64_t kSectorElements = 16;
  return row_elements % kSectorElements == 0 ? 1 : 1.5;
}

}  // namespace

// Cycles of the whole GEMM. The epilogue of a cooperative tile is exposed; in ping-pong it overlaps
// with the MMAs of the other consumer. Memory delivers less if several CTAs read the same part of B
// at a time. The CTAs of a cluster read B once if they have row blocks of one expert, but wait for
// each other, longest if rows are gathered.
double predicted_cycles(const ProjectionSize& size, const TileConfiguration& tile,
                        const DeviceModel& device) {
  const bool ping_pong = tile.schedule == Schedule::kPingPong;
  const bool hides_stores = ping_pong && tile.block_n == 192;
  if (tile.block_n == 192 && !hides_stores && column_block(size.columns) != 192)
    return std::numeric_limits<double>::infinity();
  const RowBlocks row_blocks =
      expected_row_blocks(static_cast<double>(size.rows) / static_cast<double>(size.E), tile);
  const bool small_m = tile.block_m <= device.small_m;
  if (small_m && row_blocks.of_an_expert > kOneBlock * row_blocks.touched)
    return std::numeric_limits<double>::infinity();
  const double tiles = static_cast<double>(size.E) * row_blocks.of_an_expert *
                       static_cast<double>(blocks(size.columns, tile.block_n));
  const double mma = static_cast<double>(tile.block_m) * tile.block_n *
                     static_cast<double>(blocks(size.sum, 64) * 64) / device.multiply_adds;
  const double epilogue = size.epilogue_a_column * tile.block_n * tile.block_m / 64;
  const double b_read = row_blocks.alone + (1 - row_blocks.alone) / tile.cluster;
  const double loads = static_cast<double>(blocks(size.sum, 64)) *
                       (tile.block_m + b_read * tile.block_n) * 128 * l2_parts(size.sum) /
                       device.l2_bytes;
  // Each operand once; gathered rows are few compared with the weights.
  const double operands = 2.0 * static_cast<double>(size.sum) *
                          (row_blocks.touched * static_cast<double>(size.E * size.columns) +
                           static_cast<double>(size.gathers ? 0 : size.rows));
  const double memory =
      tiles == 0 ? 0 : operands / tiles / device.memory_bytes * (1 + device.reread_cost * b_read);
  const double wait = tile.cluster == 1 ? 0
                      : size.gathers    ? device.gather_wait
                                        : device.cluster_wait;
  const bool pays = column_block(size.columns) == 192 && !size.gathers;
  const double rate = hides_stores && !pays ? device.ping_pong_192 : 1;
  const double main = std::max(rate * std::max(mma, loads) + wait, memory);
  const double tile_time = small_m     ? main + device.small_m_overhead
                           : ping_pong ? std::max(main, epilogue / 2) + device.ping_pong_overhead
                                       : main + epilogue / 2 + device.tile_overhead;
  const double waves = tiles / device.sms;
  // A last wave that is not full costs a whole one, if there are few.
  const double rounded = waves < 8 ? std::ceil(waves) : waves + 0.5;
  return rounded * tile_time;
}

const TileConfiguration& choose_tile(const ProjectionSize& size,
                                     std::span<const TileConfiguration> from,
                                     const DeviceModel& device) {
  return *std::min_element(from.begin(), from.end(), [&](const auto& a, const auto& b) {
    return predicted_cycles(size, a, device) < predicted_cycles(size, b, device);
  });
}

const TileConfiguration* choose_gradient_tile(std::span<const TileConfiguration> from, int block,
                                              bool has_long_sums,
                                              const TileConfiguration* requested) {
  const TileConfiguration* chosen = nullptr;
  for (const TileConfiguration& tile : from) {
    if (tile.block_n != block) continue;
    if (requested != nullptr && tile == *requested) return &tile;
    const auto fits = [&](const TileConfiguration& one) {
      return (one.block_m > ReferenceTiles::kRows) == has_long_sums;
    };
    if (chosen == nullptr || (!fits(*chosen) && fits(tile))) chosen = &tile;
  }
  return chosen;
}

}  // namespace tilemoe::cuda
