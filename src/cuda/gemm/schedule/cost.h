// The cost model that chooses the tile of a projection, and the devices that it is fitted to.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "cuda/core/variant.h"

namespace tilemoe::cuda {

inline constexpr double kNeverChosen = std::numeric_limits<double>::infinity();

// Rates are of one SM; the rest is fitted to measured times.
struct DeviceModel {
  int sms;
  double multiply_adds;  // a cycle
  double l2_bytes;       // a cycle
  double memory_bytes;   // a cycle
  // Cycles that a tile takes in addition to its MMAs, loads and epilogue.
  double tile_overhead, ping_pong_overhead;
  // Cycles of a ping-pong tile of 192 columns over those of its MMAs or loads, if rows are gathered
  // or 256 columns waste no more; infinite: never chosen. To fit it: see predicted_cycles().
  double ping_pong_192;
  // Cycles that the CTAs of a cluster wait for each other, with and without gathered rows.
  double gather_wait, cluster_wait;
  // Part of the operands that is read from memory once more if no CTA shares its loads of B.
  double reread_cost;
  // A tile with at most this number of rows is for experts with no more rows. Its SM continues to
  // load while it stores, and it takes these cycles in place of the overhead.
  int small_m;
  double small_m_overhead;
};

// Hopper, fitted to what `tilemoe_kernels --configurations` measured on an H100 and an H200. An H200
// has faster memory (4.8 instead of 3.4 TB/s), so that shared loads of B gain less if sums are short.
// The H100 was measured with producers that computed addresses between an empty stage and its copies:
// CTAs of a cluster waited longer, and ping-pong tiles of 192 columns took 0.98 to 1.17 times the time
// of the best cooperative tile. On the H200 they take 0.94 to 1.36 times.
constexpr DeviceModel hopper_model(int sms, double memory_bytes_per_s) {
  const bool h200 = memory_bytes_per_s > 4.1e12;
  return {.sms = sms,
          .multiply_adds = 2048,
          .l2_bytes = h200 ? 48.0 : 44.0,
          .memory_bytes = h200 ? 17.0 : 12.0,
          .tile_overhead = 300,
          .ping_pong_overhead = h200 ? 900.0 : 450.0,
          .ping_pong_192 = h200 ? 0.96 : kNeverChosen,
          .gather_wait = h200 ? 600.0 : 2600.0,
          .cluster_wait = h200 ? 450.0 : 300.0,
          .reread_cost = 0.2,
          .small_m = 64,
          .small_m_overhead = 150};
}

// Blackwell, not measured. Published of a B200: 2.25 PFLOP/s of dense 16-bit GEMMs and 8 TB/s for
// 148 SMs, which at 1.85 GHz are 4096 and 29 per cycle and SM. The rest is Hopper's; an
// epilogue is hidden behind the MMAs of the next tile.
constexpr DeviceModel blackwell_model(int sms) {
  return {.sms = sms,
          .multiply_adds = 4096,
          .l2_bytes = 44,
          .memory_bytes = 29,
          .tile_overhead = 300,
          .ping_pong_overhead = 0,
          .ping_pong_192 = kNeverChosen,
          .gather_wait = 0,
          .cluster_wait = 0,
          .reread_cost = 0.2,
          .small_m = 0,
          .small_m_overhead = 0};
}

// Any GPU, by mma.sync: rates of an H100; this arch reaches five eighths of its MMA rate.
constexpr DeviceModel mma_sync_model(int sms) {
  return {.sms = sms,
          .multiply_adds = 1280,
          .l2_bytes = 44,
          .memory_bytes = 12,
          .tile_overhead = 2500,
          .ping_pong_overhead = 0,
          .ping_pong_192 = kNeverChosen,
          .gather_wait = 0,
          .cluster_wait = 0,
          .reread_cost = 0.2,
          .small_m = 16,
          .small_m_overhead = 150};
}

// Which tile a projection uses. The candidates are the tiles that its kernels are built for; each
// is scored by a model of the time it takes.

// A projection for the model. The counts of rows are on the device, so the model assumes that every
// pair chose at random.
struct ProjectionSize {
  int64_t rows, E;
  int64_t columns;           // of the GEMM
  int64_t sum;               // d or n
  double epilogue_a_column;  // cycles of a consumer for 64 rows of one column
  bool gathers = false;      // rows of A come by threads' copies
};

// The model's score: cycles of the whole GEMM, infinite for a tile that is not offered.
//
// To fit DeviceModel::ping_pong_192 to measured times, set it to 1 and predict both the ping-pong
// tile and the best cooperative one of each layer. The constant is the median over layers of
//   (measured ping-pong / measured cooperative) * (predicted cooperative / predicted ping-pong).
// If the quotient grows as sums get shorter, raise ping_pong_overhead first: cycles of a tile.
double predicted_cycles(const ProjectionSize& size, const TileConfiguration& tile,
                        const DeviceModel& device);

// An element of `from`, which is not empty.
const TileConfiguration& choose_tile(const ProjectionSize& size,
                                     std::span<const TileConfiguration> from,
                                     const DeviceModel& device);

// On an H100, tiles of 256x192 take 0.98 times the time of 128x192 by pairs in a burst, and 0.92 and
// 0.96 times under load (gpt-oss-20b, 4096 rows of an expert). No layer with less than 1536 rows of
// an expert was measured. Their stores are not deferred, which short sums would not hide.
inline constexpr int64_t kWholeTileRows = 1536;  // of an expert on average

// The tile of a weight gradient that takes `block` dense columns at a time: the requested one if it
// is among them; else, if there is a choice, that of a whole reference tile for long sums alone.
// Null if there is none.
const TileConfiguration* choose_gradient_tile(std::span<const TileConfiguration> from, int block,
                                              bool has_long_sums,
                                              const TileConfiguration* requested);

}  // namespace tilemoe::cuda
