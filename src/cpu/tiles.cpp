#include "cpu/tiles.h"

#include <algorithm>

#include "core/check.h"
#include "cpu/gemm.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

constexpr size_t kAlignment = 64;  // a cache line

int64_t tile_floats() {
  return std::max(
      {kTileRows * 2 * kInnerColumns, kTileRows * kOuterColumns, kGradientTile * kGradientTile});
}

// Panels for the GEMMs of the projections (rows of a tile) and of the weight gradients (summed over
// rows).
int64_t largest_panels(const tilemoe_experts& experts, int64_t capacity) {
  const int64_t h_width = tilemoe_activation_gated(experts.activation) ? 2 * experts.n : experts.n;
  const int64_t d = experts.d;
  const int64_t rank = std::max(experts.rank_1, experts.rank_2);
  const int64_t projection = panel_floats(kTileRows, kOuterColumns, std::max({h_width, d, rank}));
  const int64_t gradient = panel_floats(kGradientTile, kGradientTile, std::min(capacity, kDepth));
  return std::max(projection, gradient);
}

size_t bytes_of(int64_t floats) {
  return round_up(static_cast<size_t>(floats) * sizeof(float), kAlignment);
}

}  // namespace

size_t StepScratch::bytes(const tilemoe_experts& experts, int64_t capacity) {
  const size_t worker = bytes_of(tile_floats()) + bytes_of(largest_panels(experts, capacity));
  return kAlignment + round_up(RowTiles::bytes(experts.E), kAlignment) +
         static_cast<size_t>(num_threads()) * worker;
}

StepScratch::StepScratch(const tilemoe_experts& experts, int64_t capacity, const Scratch& scratch)
    : tile_bytes_(bytes_of(tile_floats())),
      worker_bytes_(tile_bytes_ + bytes_of(largest_panels(experts, capacity))) {
  TILEMOE_ASSERT(
      scratch.bytes >= bytes(experts, capacity),
      "scratch has " << scratch.bytes << " bytes, expected at least " << bytes(experts, capacity));
  const auto address = reinterpret_cast<uintptr_t>(scratch.data);
  row_tiles_ = static_cast<char*>(scratch.data) + (round_up(address, kAlignment) - address);
  workers_ = row_tiles_ + round_up(RowTiles::bytes(experts.E), kAlignment);
}

WorkerScratch StepScratch::worker(int index) const {
  char* place = workers_ + static_cast<size_t>(index) * worker_bytes_;
  return {reinterpret_cast<float*>(place), reinterpret_cast<float*>(place + tile_bytes_)};
}

}  // namespace tilemoe::cpu
