// The epilogues of sm100: a store warp finishes its fragments of a tile in a loop over batches of
// columns. The loop is not unrolled: the unrolled code would be many times larger, and an SM would
// fetch those instructions again for every tile.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/fragment_activation.h"
#include "cuda/gemm/epilogue/fragment_activation_gradient.h"
#include "cuda/gemm/epilogue/fragment_weight_gradient.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm100.h"
#include "cuda/gemm/sm100_mma.h"
#include "cuda/gemm/split_k.h"

namespace tilemoe::cuda::sm100 {

// Calls body(m, column) for every fragment m with valid rows and every batch of columns in
// [first, min(first + kColumns, end)).
template <class Shape, int kColumns = Shape::BLOCK_N, int kStep = kBatchColumns, class Body>
__device__ __forceinline__ void for_each_batch(const Tile& tile, int32_t first, int32_t end,
                                               const Body& body) {
  const int32_t last = min(first + kColumns, end);
#pragma unroll 1
  for (int m = 0; m < Shape::kFragments; ++m) {
    if (tile.row_begin + Shape::fragment_row(m) >= tile.row_end) return;
#pragma unroll 1
    for (int32_t column = first; column < last; column += kStep) body(m, column);
  }
}

// The up-projection: bias and activation (epilogue/fragment_activation.h). The columns of a tile,
// and of a batch, are kParts parts of equal width: gate, then up of the same columns of A.
template <class Shape, Activations kActivations, bool kInterleavedColumns, FragmentStore Rows>
class ActivationEpilogue {
 public:
  using Fragment = FragmentActivation<Shape, kActivations, kInterleavedColumns, Rows>;
  static constexpr int kParts = Fragment::kParts;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // per part

  struct Params {
    typename Fragment::Params fragment;
    int32_t columns;  // of a part
  };
  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return {.fragment = Fragment::params(H, A, biases, experts),
            .columns = static_cast<int32_t>(kInterleavedColumns ? 2 * experts.n : experts.n)};
  }

  __device__ explicit ActivationEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    constexpr int kPart = kBatchColumns / kParts;
    const Fragment fragment(params_.fragment);
    const int32_t first = tile.n_block * kColumns;
    for_each_batch<Shape, kColumns, kPart>(
        tile, first, params_.columns, [&](int m, int32_t column) {
          Batch H;
#pragma unroll
          for (int part = 0; part < kParts; ++part)
            D.pull<kPart>(m, part * kColumns + column - first, &H[0][part * kPart / 2]);
          D.land(H);
          fragment.finish(m, tile, column, H);
        });
  }

 private:
  const Params& params_;
};

// The activation gradient (epilogue/fragment_activation_gradient.h). A batch is one group of ds.
template <class Shape, Activations kActivations>
class ActivationGradientEpilogue {
 public:
  using Fragment = FragmentActivationGradient<Shape, kActivations>;
  static constexpr int kColumns = Shape::BLOCK_N;
  static_assert(kBatchColumns == kDsColumns);

  using Params = typename Fragment::Params;
  static Params params(const ActivationGradient& step) { return Fragment::params(step); }

  __device__ explicit ActivationGradientEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    const int32_t first = tile.n_block * kColumns;
    const Fragment fragment(params_);
    const typename Fragment::H h(params_.H, tile);
    for_each_batch<Shape>(tile, first, params_.H.n, [&](int m, int32_t column) {
      Batch dA;
      D.read(m, column - first, dA);
      with_activation<kActivations>(
          params_.activation, [&](const auto& f) { fragment.finish(f, h, m, tile, column, dA); });
    });
  }

 private:
  const Params& params_;
};

// Stores D + bias, rounded.
template <class Shape, FragmentStore Rows>
class StoreEpilogue {
 public:
  static constexpr int kColumns = Shape::BLOCK_N;

  struct Params {
    typename Rows::Output D;  // (capacity, 1, columns)
    Bias bias;
  };

  // `bias` is (E, columns) and optional.
  static Params params(const tilemoe_tensor& D, const tilemoe_tensor& bias) {
    return {.D = Rows::output(D, 1, D.shape[1]), .bias = bias_of(bias)};
  }

  __device__ explicit StoreEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    const int32_t first = tile.n_block * kColumns;
    for_each_batch<Shape>(tile, first, params_.D.columns, [&](int m, int32_t column) {
      Batch batch;
      D.read(m, column - first, batch);
      add_bias<typename Shape::Element, 0, kBatchColumns>(params_.bias, tile.expert, column, batch);
      store_fragment<kBatchColumns>(Rows(0, 0), params_.D, m, tile.row_begin, tile.row_end, 0,
                                    column, [&](int i) { return batch[0][i]; });
    });
  }

 private:
  const Params& params_;
};

// A batch of columns of all of a warp's fragments.
template <class Shape>
using Columns = AccumulatorFragments<Shape::kFragments, kBatchColumns>;

// Partial sums: a slice is a batch of columns.
template <class Shape>
struct PartialSumsLayout {
  static constexpr int kSlices = Shape::BLOCK_N / kBatchColumns;
  static constexpr int kFragments = Shape::kFragments;
  static constexpr int kColumns = kBatchColumns;
  static constexpr int kThreads = kStoringWarps * kWarp;
  static_assert(kFirstStoringWarp * kWarp % kThreads == 0);

  // The reduction's CTA has no threads but those that store.
  __device__ __forceinline__ static float4* of_thread(float4* slice) {
    return slice + threadIdx.x % kThreads;
  }
};

// A weight gradient (fragment_weight_gradient.h), batch by batch. A tile of a split expert writes D
// as a partial sum; split_k.h adds the splits.
template <class Shape, class Out, OutputMajor kMajor>
class WeightGradientEpilogue {
 public:
  using AccumulatorFragments = FragmentWeightGradient<Shape, Out, kMajor>;

  struct Params {
    typename AccumulatorFragments::Params gradient;
    PartialSums<PartialSumsLayout<Shape>> partial_sums;
  };

  static Params params(const WeightGradient& step, void* partial_sums) {
    return {.gradient = AccumulatorFragments::params(step),
            .partial_sums = {static_cast<float4*>(partial_sums)}};
  }

  __device__ explicit WeightGradientEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    if (AccumulatorFragments(params_.gradient).leaves(tile)) return;
#pragma unroll 1
    for (int32_t column = 0; column < Shape::BLOCK_N; column += kBatchColumns) {
      Columns<Shape> columns;
#pragma unroll
      for (int m = 0; m < Shape::kFragments; ++m) D.pull<kBatchColumns>(m, column, columns[m]);
      D.land(columns);
      if (tile.partial_sum >= 0)
        params_.partial_sums.write(PartialSumsLayout<Shape>::of_thread(params_.partial_sums.at(
                                       tile.partial_sum, column / kBatchColumns)),
                                   columns);
      else
        store_columns(columns, tile, column);
    }
  }

  // Stores one batch of columns of all fragments of the warp, from `column` of the tile on.
  __device__ __forceinline__ void store_columns(Columns<Shape>& D, const Tile& tile,
                                                int32_t column) const {
    const AccumulatorFragments fragments(params_.gradient);
    fragments.store(D, fragments.place_of(tile, column));
  }

 private:
  const Params& params_;
};

// The reduction of its partial sums: by CTAs of as many warps as store a GEMM's tile.
template <class Gemm>
struct WeightGradientReduction {
  using Shape = typename Gemm::Shape;
  using Order = typename Gemm::Order;
  using Sums = PartialSums<PartialSumsLayout<Shape>>;
  using Epilogue = typename Gemm::Epilogue;
  static constexpr int kThreads = Sums::kThreads, kMinCtas = 4, kNBlocks = 1;

  struct Params {
    typename Order::Params order;
    typename Epilogue::Params epilogue;
  };
  static Params params(const typename Gemm::Params& gemm, const WeightGradient& /*step*/) {
    return {.order = gemm.order, .epilogue = gemm.epilogue};
  }

  __device__ __forceinline__ static int32_t worker() { return 0; }
  __device__ __forceinline__ static int32_t rows(const Params& params) {
    return params.epilogue.gradient.size.rows;
  }
  __device__ __forceinline__ static const Sums& sums(const Params& params) {
    return params.epilogue.partial_sums;
  }
  __device__ __forceinline__ static void store(const Params& params, typename Sums::Slice& D,
                                               const Tile& tile, int32_t slice,
                                               int32_t /*worker*/) {
    Epilogue(params.epilogue).store_columns(D, tile, slice * kBatchColumns);
  }
};

}  // namespace tilemoe::cuda::sm100
