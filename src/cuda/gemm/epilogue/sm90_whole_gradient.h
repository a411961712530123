// The epilogue of the weight gradients for CTAs with whole reference tiles: 256 rows of D, half a
// tile for each consumer. The accumulators leave no registers for a deferred store.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/epilogue/sm90_store.h"
#include "cuda/gemm/epilogue/sm90_weight_gradient.h"
#include "cuda/gemm/epilogue/weight_gradient.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm90 {

// The GEMM of the same gradient by CTA pairs, as far as the reduction of partial sums needs it:
// partial sums are those of the halves, whichever kernel writes them.
template <class Shape_, class Out, OutputMajor kMajor>
struct HalvesOfGradient {
  using Shape =
      TileShape<typename Shape_::Recipe, TileConfiguration{ReferenceTiles::kRows, Shape_::BLOCK_N,
                                                           Schedule::kCooperative, 2}>;
  using Order = ExpertTiles<Shape::BLOCK_K>;
  using Epilogue = WeightGradientEpilogue<Shape, Out, kMajor>;
  struct Params {
    typename Order::Params order;
    typename Epilogue::Params epilogue;
  };
};

template <class Shape, class Out, OutputMajor kMajor>
class WholeGradientEpilogue {
 public:
  using Halves = HalvesOfGradient<Shape, Out, kMajor>;
  using Half = typename Halves::Epilogue;
  static_assert(!Half::kFloat && Shape::kFragments == 2);
  static constexpr bool kTransposed = Half::kTransposed;
  using Store = std::conditional_t<
      kTransposed, typename Half::Store,
      RaggedStore<typename Halves::Shape, typename Half::Element, kNarrowStoreColumns>>;
  static constexpr int kSharedBytes = Store::kSharedBytes;
  using Params = typename Half::Params;

  static Params params(const WeightGradient& step, void* partial_sums) {
    Params params = Half::params(step, partial_sums);
    if constexpr (!kTransposed)
      for (int p = 0; p < step.parts; ++p)
        params.part[p] = Half::part_of(step.part[p].out, params.size.rows, params.size.columns,
                                       kNarrowStoreColumns);
    return params;
  }

  __device__ WholeGradientEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), store_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    const int32_t part = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    const GradientPlace place{part, tile.expert,
                              tile.m_block * Shape::BLOCK_M + row - tile.row_begin,
                              (tile.n_block - part * params_.blocks_a_part) * Shape::BLOCK_N};
    const bool nothing_to_add = params_.accumulate && tile.row_begin == tile.row_end;
    if (place.row >= params_.size.rows || nothing_to_add) return;
    if (tile.partial_sum >= 0) {
      write_half(tile.partial_sum + (row - tile.row_begin) / ReferenceTiles::kRows, D);
      return;
    }
    if (params_.accumulate)
      add_gradient<Shape, kMajor>(params_.part[part].gradient, params_.size, place, D);
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int first = 0; first < Shape::BLOCK_N; first += Store::kBatchColumns)
        store_batch(place, m, first, D);
  }

  __device__ void finish() const {
    store_.finish();
  }

 private:
  // The numbers of fragment m are those that consumer m has of a half.
  __device__ __forceinline__ void write_half(int32_t half, const Accumulators<Shape>& D) const {
    using Layout = PartialSumsLayout<typename Halves::Shape>;
    using Fragment = const float(&)[1][Shape::BLOCK_N / 2];
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
      write_slices<Layout>(half, m * kWarpgroup + static_cast<int32_t>(threadIdx.x % kWarpgroup),
                           reinterpret_cast<Fragment>(D[m]));
  }
  template <class Layout, int kSlice = 0, class Fragment>
  __device__ __forceinline__ void write_slices(int32_t half, int32_t thread, Fragment& D) const {
    if constexpr (kSlice < Layout::kSlices) {
      PartialSums<Layout>::template write<kSlice * Layout::kColumns / 2>(
          params_.partial_sums.at(half, kSlice) + thread, D);
      write_slices<Layout, kSlice + 1>(half, thread, D);
    }
  }

  __device__ __forceinline__ void store_batch(const GradientPlace& place, int m, int first,
                                              const Accumulators<Shape>& D) {
    uint32_t words[Store::kBatchColumns / 8][2];
#pragma unroll
    for (int j = 0; j < Store::kBatchColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const two = &D[m][first / 2 + 4 * j + 2 * half];
        ptx::pin(words[j][half] = pack(two[0], two[1], typename Half::Element()));
      }
    const auto& out = params_.part[place.part].out;
    const int32_t column = place.column + first, row = place.row + m * 64;
    if constexpr (!kTransposed)
      store_.store_packed(out, 0, row, params_.size.rows, place.expert, column, words);
    else if (row < params_.size.rows && column < params_.size.columns)
      store_.store_packed(out, row, place.expert, column, words);
  }

  const Params& params_;
  Store store_;
};

}  // namespace tilemoe::cuda::sm90
