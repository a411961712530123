// Split-K of the weight gradients on sm90 and sm100 (sm80: sm80_split_k.h). The work on long
// experts is divided into equal splits (schedule/splits.h). If the border of two splits lies within
// a tile, the CTAs on both sides write the float32 accumulators of their k blocks to memory, as the
// threads have them; a second kernel adds these partial sums in the order of the rows and stores
// the tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/core/experts_plan.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda {

// The partial sums of a tile: slices of its columns; of each slice, the threads' accumulators, 4 at
// a time. Layout says how an arch's threads have a slice:
//   kSlices      slices of a tile
//   kFragments   of a thread, in each slice
//   kColumns     of a slice
//   kThreads     that have a slice
//   of_thread()  first address of this thread in a slice, in the second kernel
template <class Layout>
struct PartialSums {
  static constexpr int kSlices = Layout::kSlices;
  static constexpr int kVectors = Layout::kColumns / 2 / 4;  // of a fragment
  static constexpr int kThreads = Layout::kThreads;
  using Slice = float[Layout::kFragments][Layout::kColumns / 2];

  float4* data;

  __device__ float4* at(int32_t tile, int32_t slice) const {
    return data + (static_cast<int64_t>(tile) * kSlices + slice) *
                      (Layout::kFragments * kVectors * kThreads);
  }

  // Writes the thread's numbers of a slice, those from kFirst on of each fragment of D, from the
  // thread's first address on.
  template <int kFirst = 0, int kNumbers>
  __device__ __forceinline__ static void write(float4* to,
                                               const float (&D)[Layout::kFragments][kNumbers]) {
#pragma unroll
    for (int m = 0; m < Layout::kFragments; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* const value = &D[m][kFirst + 4 * v];
        to[(m * kVectors + v) * kThreads] = {value[0], value[1], value[2], value[3]};
      }
  }

  __device__ __forceinline__ void add(int32_t tile, int32_t slice, Slice& D) const {
    const float4* const from = Layout::of_thread(at(tile, slice));
#pragma unroll
    for (int m = 0; m < Layout::kFragments; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 part = from[(m * kVectors + v) * kThreads];
        float* const value = &D[m][4 * v];
        value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
      }
  }
};

// The second kernel. CTA (i, j) has the border of splits i and i + 1, and slice j of the tile that
// this border cuts, counted over the tile's halves. If several borders cut a tile, the first one's
// CTA has it. Reduction is an arch's part:
//   Shape, Order, Sums  the GEMM's; Sums is its PartialSums
//   Params              has `order` and `epilogue`
//   sums(), rows()      the partial sums in Params; the gradient's rows
//   kThreads, kMinCtas  launch bounds
//   kNBlocks            n blocks that the epilogue counts for one of the GEMM: kSlices, or 1
//   worker()            part of the CTA that this thread belongs to; -1: it only ends
//   store()             stores a slice of the tile
template <class Reduction>
__global__ void __launch_bounds__(Reduction::kThreads, Reduction::kMinCtas)
    reduce_splits(const __grid_constant__ typename Reduction::Params params) {
  using Sums = typename Reduction::Sums;
  wait_for_previous();
  const int32_t worker = Reduction::worker();
  if (worker < 0) return;
  const LongTiles long_tiles(params.order.long_tiles);
  const int32_t border = static_cast<int32_t>(blockIdx.x) + 1;
  const Splits& splits = long_tiles.splits();
  if (border >= splits.count) return;
  const int32_t at = splits.begin(border);
  const LongTiles::Place place = long_tiles.at(at, long_tiles.rank_at(at));
  const int32_t tile_begin = at - place.k_block;
  if (place.k_block == 0 || splits.begin(border - 1) > tile_begin) return;

  const auto slice = static_cast<int32_t>(blockIdx.y) % Sums::kSlices;
  const auto half = static_cast<int32_t>(blockIdx.y) / Sums::kSlices;
  Tile tile = Reduction::Order::tile_of(params.order, place.expert, place.tile, half);
  const int32_t tile_end = tile_begin + tile.k_blocks;
  tile.n_block = tile.n_block * Reduction::kNBlocks + (Reduction::kNBlocks > 1 ? slice : 0);
  if (tile.m_block * Reduction::Shape::BLOCK_M >= Reduction::rows(params)) return;
  typename Sums::Slice D = {};
  const auto add = [&](int32_t split, bool at_its_end) {
    Reduction::sums(params).add(Splits::partial_sum(split, at_its_end) * 2 + half, slice, D);
  };
  add(border - 1, true);
  for (int32_t split = border; splits.begin(split) < tile_end; ++split) add(split, false);
  Reduction::store(params, D, tile, slice, worker);
}

// For the GEMM that was launched with `params`.
template <class Reduction, class GemmParams>
void launch_reduce_splits(const GemmParams& params, const WeightGradient& step) {
  launch_pdl<reduce_splits<Reduction>>(
      {.device = device_of(step.tuning.plan),
       .blocks = dim3(static_cast<unsigned>(step.splits - 1), Reduction::Sums::kSlices * 2),
       .threads = Reduction::kThreads,
       .stream = static_cast<cudaStream_t>(step.stream)},
      Reduction::params(params, step));
}

}  // namespace tilemoe::cuda
