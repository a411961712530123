// Which tile a projection uses. The candidates are the tiles that its kernels are built for; each
// is scored by a model of the time it takes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cuda/sm90/shape.h"

namespace tilemoe::cuda {

struct TileConfiguration {
  int block_m, block_n;
  Schedule schedule;
  int cluster = 1;  // blocks that share what they read of B
  bool operator==(const TileConfiguration&) const = default;
};

inline constexpr TileConfiguration kCooperative256{128, 256, Schedule::kCooperative};
inline constexpr TileConfiguration kCooperative256Cluster{128, 256, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kCooperative192Cluster{128, 192, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kPingPong128{128, 128, Schedule::kPingPong};

// A projection as the model sees it; the counts of experts' rows are on the device, so rows are
// taken as if every pair had chosen at random.
struct ProjectionSize {
  int64_t rows, E;
  int64_t columns;           // of the product
  int64_t sum;               // d or n
  double epilogue_a_column;  // cycles of a consumer for 64 rows of one column
  bool gathers = false;      // rows of A come by threads' copies
};

TileConfiguration choose_tile(const ProjectionSize& size, std::span<const TileConfiguration> from,
                              int multiprocessors);

// For benchmarks: every choice that can takes this tile. Not to be called while steps run.
void force_tile(std::optional<TileConfiguration> tile);

// Blocks of columns that share rows while they are in L2; see RowTiles.
constexpr int32_t kColumnGroup = 8;
int32_t column_group();
// For benchmarks, as above.
void force_column_group(std::optional<int32_t> blocks);

// Whether the products and the combine start while the kernel before them ends: forward was up to
// 0.8 % slower so (docs/decisions.md), and only benchmarks ask for it.
bool early_steps();
void force_early_steps(bool early);

}  // namespace tilemoe::cuda
