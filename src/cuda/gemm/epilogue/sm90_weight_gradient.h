// The epilogue of the weight gradients: D or its transpose, written or added, in 16 bits or
// float32.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/epilogue/sm90_store.h"
#include "cuda/gemm/epilogue/weight_gradient.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90.h"
#include "cuda/gemm/sm90_epilogue.h"
#include "cuda/gemm/split_k.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::sm90 {

// Stores D^T in 16 bits: a consumer's 64 rows become 128 contiguous bytes of the output's rows,
// which are D's columns. Batches of columns alternate between two slots of shared memory: all four
// warps write one slot, transposed, while TMA stores the other.
template <class Shape, class Element>
class TransposedStore {
 public:
  static constexpr int kBatchColumns = 64;
  static constexpr int kRowBytes = 64 * static_cast<int>(sizeof(Element));
  static constexpr int kSlotBytes = kBatchColumns * kRowBytes;
  static constexpr int kSlots = 2;
  static constexpr int kSharedBytes = kSlots * kSlotBytes;  // of a consumer
  static_assert(Shape::kFragments == 1 && kRowBytes == 128,
                "a swizzled row of the consumer's rows");

  __device__ TransposedStore(uint32_t shared, int32_t thread) : shared_(shared) {
    // Lane l addresses row l % 8 of one of four 8x8 blocks: left and right columns of D, upper and
    // lower rows of D.
    const uint32_t lane = thread % kWarp, warp = thread / kWarp;
    lane_offset_ =
        (lane / 16 * 8 + lane % 8) * kRowBytes + swizzled_chunk(lane % 8, warp * 2 + lane / 8 % 2);
  }

  // Stores kBatchColumns columns of D to rows from `out_row` and columns from `out_column` of the
  // output's part `part`. words[j][half] holds accumulators 4 j + 2 half and 4 j + 2 half + 1. The
  // map has boxes of (kBatchColumns, 1, 64) and clips at the output's end. All threads of the
  // consumer call it.
  __device__ __forceinline__ void store_packed(const CUtensorMap& out, int32_t out_column,
                                               int32_t part, int32_t out_row,
                                               const uint32_t (*words)[2]) {
    const uint32_t slot = shared_ + next_slot_ * kSlotBytes;
    next_slot_ = (next_slot_ + 1) % kSlots;
    const bool sends = threadIdx.x % kWarpgroup == 0;
    if (sends) ptx::tma_store_wait_read<kSlots - 1>();
    sync();  // TMA has read the slot
#pragma unroll
    for (int j = 0; j < kBatchColumns / 8; j += 2)
      ptx::stmatrix_x4_transposed(slot + lane_offset_ + j * 8 * kRowBytes, words[j][0], words[j][1],
                                  words[j + 1][0], words[j + 1][1]);
    ptx::fence_proxy_async();
    sync();
    if (sends) {
      ptx::tma_store(&out, slot, out_column, part, out_row);
      ptx::tma_store_commit();
    }
  }

  __device__ void finish() const {
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait();
  }

 private:
  __device__ static void sync() {
    const auto consumer = static_cast<int32_t>(threadIdx.x / kWarpgroup) - 1;
    ptx::barrier_sync(number_of(NamedBarrier::kStore0, consumer), kWarpgroup);
  }

  uint32_t shared_;       // this consumer's slots
  uint32_t lane_offset_;  // of the row that this lane addresses, in a slot
  int32_t next_slot_ = 0;
};

// Partial sums: slices of 64 columns, of which every consumer thread has 32 numbers.
template <class Shape>
struct PartialSumsLayout {
  static constexpr int kColumns = 64;
  static constexpr int kSlices = Shape::BLOCK_N / kColumns;
  static constexpr int kFragments = 1;
  static constexpr int kThreads = kConsumers * kWarpgroup;
  static_assert(Shape::kFragments == 1 && Shape::kSchedule == Schedule::kCooperative);

  // The producer's threads come first.
  __device__ __forceinline__ static float4* of_thread(float4* slice) {
    return slice + threadIdx.x - kWarpgroup;
  }
};

template <class Shape, int kSlice = 0>
__device__ __forceinline__ void write_slices(const PartialSums<PartialSumsLayout<Shape>>& to,
                                             int32_t tile, const Accumulators<Shape>& D) {
  using Layout = PartialSumsLayout<Shape>;
  if constexpr (kSlice < Layout::kSlices) {
    to.template write<kSlice * Layout::kColumns / 2>(Layout::of_thread(to.at(tile, kSlice)), D);
    write_slices<Shape, kSlice + 1>(to, tile, D);
  }
}

// D, or its transpose, as an expert's weight gradient: written, or added to the gradient in float32
// and rounded once. D's columns are in one or two parts, each a gradient. If the tile is one split
// of a split-K sum, D is written to the partial sums instead.
template <class Shape, class Out, OutputMajor kMajor>
class WeightGradientEpilogue {
 public:
  template <class Other>
  using Of = WeightGradientEpilogue<Other, Out, kMajor>;  // the same epilogue for another shape
  static constexpr bool kFloat = std::is_same_v<Out, float>;
  static constexpr bool kTransposed = kMajor == OutputMajor::kColumn;
  using Element = typename Shape::Recipe::Out::dW;  // of the 16-bit stores
  using Store =
      std::conditional_t<kTransposed, TransposedStore<Shape, Element>, RaggedStore<Shape, Element>>;
  using Output = std::conditional_t<kTransposed, CUtensorMap, RaggedOutput>;
  static constexpr int kSharedBytes = kFloat ? 0 : Store::kSharedBytes;
  static constexpr int kBatches = Shape::BLOCK_N / Store::kBatchColumns;

  struct Part {
    Output out;  // in 16 bits
    Gradient<Out> gradient;
  };
  struct Params {
    Part part[2];
    GradientSize size;  // of D, the columns of a part
    int32_t blocks_a_part;
    bool accumulate;
    PartialSums<PartialSumsLayout<Shape>> partial_sums;
  };

  // The partial sums have the GEMM's tiles; the epilogue of a slice writes none.
  static Params params(const WeightGradient& step, void* partial_sums) {
    const int64_t columns = step.dense_columns, rows = step.gathered.shape[1];
    Params params{
        .part = {},
        .size = {.rows = static_cast<int32_t>(rows), .columns = static_cast<int32_t>(columns)},
        .blocks_a_part = static_cast<int32_t>((columns + Shape::BLOCK_N - 1) / Shape::BLOCK_N),
        .accumulate = step.accumulate,
        .partial_sums = {static_cast<float4*>(partial_sums)}};
    for (int p = 0; p < step.parts; ++p) params.part[p] = part_of(step.part[p].out, rows, columns);
    return params;
  }

  __device__ WeightGradientEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), store_(shared, thread) {}

  // Float32 is stored at once.
  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile,
                                        int32_t row) requires(kFloat) {
    const GradientPlace place = place_of(tile, row);
    if (!finish_sum(D, tile, place)) return;
    write_gradient<Shape, kMajor>(params_.part[place.part].gradient, params_.size, place, D);
  }

  // The stores of 16 bits are deferred.
  __device__ __forceinline__ void defer(Accumulators<Shape>& D, const Tile& tile,
                                        int32_t row) requires(!kFloat) {
    place_ = place_of(tile, row);
    has_deferred_ = finish_sum(D, tile, place_);
    if (has_deferred_) deferred_.round(D);
  }
  __device__ __forceinline__ void store_deferred(int32_t batch) requires(!kFloat) {
    if (!has_deferred_) return;
    const Output& out = params_.part[place_.part].out;
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      if (i != batch) continue;  // registers have constant numbers
      const int32_t column = place_.column + i * Store::kBatchColumns;
      const auto* words = &deferred_.words[0][i * Store::kBatchColumns / 8];
      if constexpr (!kTransposed)
        store_.store_packed(out, 0, place_.row, params_.size.rows, place_.expert, column, words);
      else if (column < params_.size.columns)
        store_.store_packed(out, place_.row, place_.expert, column, words);
    }
  }

  __device__ void finish() const {
    store_.finish();
  }

  // `out`: (E, columns, rows)
  static Part part_of(const tilemoe_tensor& out, int64_t rows, int64_t columns,
                      int store_columns = kStoreColumns) {
    const int64_t E = out.shape[0], stride = kTransposed ? out.stride[1] : out.stride[2];
    Part part{
        .out = {},
        .gradient = {
            .data = static_cast<Out*>(out.data), .expert_stride = out.stride[0], .stride = stride}};
    if constexpr (kFloat)
      return part;
    else if constexpr (kTransposed)
      part.out = make_tensor_map({.dtype = kDTypeOf<Out>,
                                  .data = out.data,
                                  .size = {rows, E, columns},
                                  .stride = {out.stride[0], stride},
                                  .box = {64, 1, Store::kBatchColumns}});
    else
      part.out = {.map = make_ragged_parts_map({.dtype = kDTypeOf<Out>,
                                                .data = out.data,
                                                .columns = columns,
                                                .rows = rows,
                                                .row_stride = stride,
                                                .box = {store_columns, kStoreRows}},
                                               {.count = E, .stride = out.stride[0]}),
                  .columns = static_cast<int32_t>(columns)};
    return part;
  }

 private:
  __device__ GradientPlace place_of(const Tile& tile, int32_t row) const {
    const int32_t part = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    return {part, tile.expert, tile.m_block * Shape::BLOCK_M + row - tile.row_begin,
            (tile.n_block - part * params_.blocks_a_part) * Shape::BLOCK_N};
  }

  // Adds the gradient in memory if requested. Returns false if nothing is stored: the rows are
  // outside, nothing is to be added, or D is a split and was written to the partial sums.
  __device__ __forceinline__ bool finish_sum(Accumulators<Shape>& D, const Tile& tile,
                                             const GradientPlace& place) const {
    const bool nothing_to_add = params_.accumulate && tile.row_begin == tile.row_end;
    if (place.row >= params_.size.rows || nothing_to_add) return false;
    if (tile.partial_sum >= 0) {
      write_slices<Shape>(params_.partial_sums, tile.partial_sum, D);
      return false;
    }
    if (params_.accumulate)
      add_gradient<Shape, kMajor>(params_.part[place.part].gradient, params_.size, place, D);
    return true;
  }

  const Params& params_;
  Store store_;
  DeferredTile<Shape, Element> deferred_;
  GradientPlace place_;  // of the deferred tile, if any
  bool has_deferred_ = false;
};

// The reduction of its partial sums: by CTAs whose consumers have one slice.
template <class Gemm>
struct WeightGradientReduction {
  using Shape = typename Gemm::Shape;
  using Order = typename Gemm::Order;
  using Sums = PartialSums<PartialSumsLayout<Shape>>;
  using Slice = TileShape<typename Shape::Recipe,
                          TileConfiguration{Shape::BLOCK_M, PartialSumsLayout<Shape>::kColumns,
                                            Shape::kSchedule}>;
  using Epilogue = typename Gemm::Epilogue::template Of<Slice>;
  static constexpr int kThreads = kBlockThreads, kMinCtas = 0, kNBlocks = Sums::kSlices;

  struct Params {
    typename Order::Params order;
    typename Epilogue::Params epilogue;
    Sums partial_sums;
  };
  static Params params(const typename Gemm::Params& gemm, const WeightGradient& step) {
    Params params{.order = gemm.order,
                  .epilogue = Epilogue::params(step, nullptr),
                  .partial_sums = gemm.epilogue.partial_sums};
    params.epilogue.blocks_a_part = gemm.epilogue.blocks_a_part * Sums::kSlices;
    return params;
  }

  // The epilogue's threads are the consumers of a GEMM's CTA.
  __device__ __forceinline__ static int32_t worker() {
    return static_cast<int32_t>(threadIdx.x / kWarpgroup) - 1;
  }
  __device__ __forceinline__ static int32_t rows(const Params& params) {
    return params.epilogue.size.rows;
  }
  __device__ __forceinline__ static const Sums& sums(const Params& params) {
    return params.partial_sums;
  }
  __device__ __forceinline__ static void store(const Params& params, typename Sums::Slice& D,
                                               const Tile& tile, int32_t /*slice*/,
                                               int32_t consumer) {
    __shared__ __align__(kSwizzleAtom) uint8_t memory[kConsumers * Epilogue::kSharedBytes + 16];
    Epilogue epilogue(params.epilogue,
                      ptx::shared_address(memory) + consumer * Epilogue::kSharedBytes,
                      static_cast<int32_t>(threadIdx.x % kWarpgroup));
    store_at_once(epilogue, D, tile, tile.row_begin + consumer * Shape::kRows);
    epilogue.finish();
  }
};

}  // namespace tilemoe::cuda::sm90
