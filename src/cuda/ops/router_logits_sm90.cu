// router_logits by wgmma, for the tiles that one CTA computes: in a chunk it has the bits of
// mma.sync (docs/kernels.md), which computes smaller batches.
#include <algorithm>

#include "cuda/core/recipe.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ops/logit_chunks.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::logits {
namespace {

// Operand A (tokens) or B (experts) of a chunk. TMA fills what is past the last row and column with
// zeros.
template <class Shape, bool kIsA>
class ChunkBoxes {
 public:
  static constexpr int kRows = kIsA ? Shape::BLOCK_M : Shape::BLOCK_N;
  using Operand = StagedOperand<Major::kK, kRows>;
  static constexpr int kTmaBytes = Operand::kBytes;

  struct Params {
    CUtensorMap rows;  // (1, rows, columns), boxes of (1, kRows, BLOCK_K)
    int32_t chunk_columns;
    bool repeats;  // each k block is multiplied kTerms times
  };
  static Params params(const tilemoe_tensor& rows, int64_t chunk_columns, bool repeats) {
    return {.rows = make_tensor_map({.dtype = kDTypeOf<typename Shape::Element>,
                                     .data = rows.data,
                                     .size = {rows.shape[1], rows.shape[0], 1},
                                     .stride = {rows.stride[0], 0},
                                     .box = {Shape::BLOCK_K, kRows, 1}}),
            .chunk_columns = static_cast<int32_t>(chunk_columns),
            .repeats = repeats};
  }

  __device__ ChunkBoxes(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const { ptx::tma_prefetch_map(&params_.rows); }
  __device__ void begin(const Tile& tile) {
    row_ = kIsA ? tile.row_begin : tile.n_block * kRows;
    column_ = tile.expert * params_.chunk_columns;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    const int32_t block = params_.repeats ? k_block / kTerms : k_block;
    ptx::tma_load(shared, &params_.rows, full, column_ + block * Shape::BLOCK_K, row_, 0);
  }

 private:
  const Params& params_;
  int32_t row_, column_;
};

// Adds the chunks of a tile, 64 columns of a warp's rows at a time, and stores the logits after the
// last one.
template <class Shape>
class ChunkSums {
 public:
  static constexpr int kSharedBytes = 0;

  struct Params {
    float4* sums;  // (CTAs, vectors, threads)
    int32_t chunks;
    Output output;
  };

  __device__ ChunkSums(const Params& params, uint32_t /*shared*/, int32_t /*thread*/)
      : params_(params) {}

  __device__ __forceinline__ void store(sm90::Accumulators<Shape>& D, const Tile& tile,
                                        int32_t row) const {
    const Sums own(params_.sums + int64_t{blockIdx.x} * (kVectors * kThreads) + threadIdx.x -
                   sm90::kWarpgroup);
    const bool is_last = tile.expert + 1 == params_.chunks;
    const int32_t first = row + Shape::fragment_row(0);
    if (first >= params_.output.T) return;
      // As a loop: unrolled, it is 160 KiB of instructions. Registers have constant numbers, so the
      // other columns move down after each.
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      auto& chunk = reinterpret_cast<float(&)[kNumbers]>(D[0][0]);
      const int vector = part * (kNumbers / 4);
      if (tile.expert > 0) own.add_to(vector, chunk);
      if (is_last)
        params_.output.store(chunk, first, tile.n_block * Shape::BLOCK_N + part * kColumns);
      else
        own.keep(vector, chunk);
#pragma unroll
      for (int later = kNumbers; later < kParts * kNumbers; ++later)
        D[0][later - kNumbers] = D[0][later];
    }
  }
  __device__ void finish() const {}

 private:
  static constexpr int kColumns = 64, kNumbers = kColumns / 2;  // of a part, of a thread
  static constexpr int kParts = Shape::BLOCK_N / kColumns;
  static_assert(Shape::kFragments == 1);
  static constexpr int kThreads = sm90::kConsumers * sm90::kWarpgroup;
  static constexpr int kVectors = Shape::BLOCK_N / 8;
  using Sums = ThreadSums<kThreads>;

  const Params& params_;
};

template <class Element, TileConfiguration kTile>
void launch(const LogitsCall& call) {
  using Shape = sm90::TileShape<SixteenBit<Element>, kTile>;
  using A = ChunkBoxes<Shape, true>;
  using B = ChunkBoxes<Shape, false>;
  using Order = ChunkTiles<Shape::BLOCK_M>;
  using Gemm = sm90::GroupedGemm<Shape, A, B, ChunkSums<Shape>, Order>;
  const typename Gemm::Params params{.a = A::params(call.X, kChunkColumns, call.terms > 1),
                                     .b = B::params(call.weight, kChunkColumns * call.terms, false),
                                     .epilogue = {.sums = call.sums,
                                                  .chunks = static_cast<int32_t>(call.cut.chunks),
                                                  .output = call.output},
                                     .order = call.order<Order>()};
  launch_gemm<sm90::grouped_gemm<Gemm>, Gemm>(params, call.cut.tiles, call.stream,
                                              Tuning{.pdl = true});
}

}  // namespace

void launch_sm90(const LogitsCall& call) {
  with_element(call.X.dtype, [&]<class Element>() {
    if (call.cut.tile == kWide) return launch<Element, kWide>(call);
    if (call.cut.tile == kMiddle) return launch<Element, kMiddle>(call);
    return launch<Element, kNarrow>(call);
  });
}

}  // namespace tilemoe::cuda::logits
