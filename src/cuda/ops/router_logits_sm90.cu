// router_logits by wgmma, for the tiles that one CTA computes: in a chunk it has the bits of
// mma.sync (docs/kernels.md), which computes smaller batches.
#include <algorithm>

#include "cuda/core/recipe.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ops/kept_tokens_sm90.h"
#include "cuda/ops/logit_chunks.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::logits {
namespace {

// Operand A (tokens) or B (experts) of a chunk. TMA fills what is past the last row and column with
// zeros. The CTAs of a cluster share B: each loads half of it, for both.
template <class Shape, bool kIsA>
class ChunkBoxes {
 public:
  static constexpr int kRows = kIsA ? Shape::BLOCK_M : Shape::BLOCK_N;
  using Operand = StagedOperand<Major::kK, kRows>;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr int kBoxes = kIsA ? 1 : Shape::kCluster;
  static constexpr int kBoxRows = kRows / kBoxes;

  struct Params {
    CUtensorMap rows;  // (1, rows, columns), boxes of (1, kBoxRows, BLOCK_K)
    int32_t chunk_columns;
    bool repeats;  // each k block is multiplied kTerms times
  };
  static Params params(const tilemoe_tensor& rows, int64_t chunk_columns, bool repeats) {
    return {.rows = make_tensor_map({.dtype = kDTypeOf<typename Shape::Element>,
                                     .data = rows.data,
                                     .size = {rows.shape[1], rows.shape[0], 1},
                                     .stride = {rows.stride[0], 0},
                                     .box = {Shape::BLOCK_K, kBoxRows, 1}}),
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
    load::load_boxes<kBoxes, kIsA ? 1 : Shape::kCluster>(*this, true, shared, full,
                                                         column_ + block * Shape::BLOCK_K);
  }
  template <class Copy>
  __device__ void load_box(Copy copy, int32_t number, uint32_t shared, uint32_t full,
                           int32_t column) const {
    copy.load(shared + number * kBoxRows * Operand::kRowBytes, &params_.rows, full, column,
              row_ + number * kBoxRows, 0);
  }

 private:
  const Params& params_;
  int32_t row_, column_;
};

// Adds the chunks of a tile in registers. The logits are stored during the MMAs of the next tile's
// first chunk.
template <class Shape>
class ChunkSums {
 public:
  static constexpr int kSharedBytes = 0;

  struct Params {
    int32_t chunks;
    Output output;
  };

  __device__ ChunkSums(const Params& params, uint32_t /*shared*/, int32_t /*thread*/)
      : params_(params) {}

  static constexpr int kBatchColumns = 32, kNumbers = kBatchColumns / 2;  // of a thread
  static constexpr int kBatches = Shape::BLOCK_N / kBatchColumns;
  static_assert(kBatches <= kChunkBlocks);

  __device__ __forceinline__ void defer(const sm90::Accumulators<Shape>& D, const Tile& tile,
                                        int32_t row) {
    add_chunk(sum_, D[0], tile.expert == 0);
    is_deferred_ = tile.expert + 1 == params_.chunks;
    row_ = row + Shape::fragment_row(0);
    column_ = tile.n_block * Shape::BLOCK_N;
  }
  // Registers have constant numbers, so the other columns move down after each batch: unrolled,
  // the stores are 140 KiB of instructions.
  __device__ __forceinline__ void store_deferred(int32_t batch) {
    if (!is_deferred_ || batch >= kBatches) return;
    if (row_ < params_.output.T)
      params_.output.store(reinterpret_cast<float(&)[kNumbers]>(sum_[0]), row_,
                           column_ + batch * kBatchColumns);
#pragma unroll
    for (int later = kNumbers; later < kBatches * kNumbers; ++later)
      sum_[later - kNumbers] = sum_[later];
  }
  __device__ void finish() const {}

 private:
  static_assert(Shape::kFragments == 1);

  const Params& params_;
  float sum_[Shape::BLOCK_N / 2];
  int32_t row_, column_;  // of the deferred tile
  bool is_deferred_ = false;
};

template <class Element, TileConfiguration kTile>
void launch(const LogitsCall& call) {
  using Shape = sm90::TileShape<SixteenBit<Element>, kTile>;
  using A = ChunkBoxes<Shape, true>;
  using B = ChunkBoxes<Shape, false>;
  using Order = ChunkTiles<Shape::BLOCK_M, Shape::kCluster>;
  using Gemm = sm90::GroupedGemm<Shape, A, B, ChunkSums<Shape>, Order>;
  const typename Gemm::Params params{
      .a = A::params(call.X, kChunkColumns, call.terms > 1),
      .b = B::params(call.weight, kChunkColumns * call.terms, false),
      .epilogue = {.chunks = static_cast<int32_t>(call.cut.chunks), .output = call.output},
      .order = call.order<Order>()};
  launch_gemm<sm90::grouped_gemm<Gemm>, Gemm>(params, params.order.tiles, call.stream,
                                              Tuning{.pdl = true});
}

constexpr TileConfiguration kWidePair{kWide.block_m, kWide.block_n, Schedule::kCooperative, 2};

template <class Element, TileConfiguration kTile>
void launch_kept_tokens(const LogitsCall& call) {
  using Shape = sm90::TileShape<SixteenBit<Element>, kTile>;
  using Gemm = KeptTokensGemm<Shape, ChunkBoxes<Shape, true>, ChunkBoxes<Shape, false>>;
  typename Gemm::Params params{
      .tokens = Gemm::Tokens::params(call.X, kChunkColumns, false),
      .weight = Gemm::Weight::params(call.weight, kChunkColumns * call.terms, false),
      .order = call.order<typename Gemm::Order>(),
      .output = call.output,
      .rows = Gemm::Store::output(call.rows, 1, call.output.E),
      .tiles = static_cast<int32_t>(call.cut.n_blocks),
      .terms = call.terms};
  params.order.k_blocks /= call.terms, params.order.last_k_blocks /= call.terms;
  params.order.n_blocks = static_cast<int32_t>(blocks_of(call.cut.n_blocks, Gemm::kTiles));
  params.order.tiles =
      static_cast<int32_t>(Gemm::Order::tiles(call.output.T, params.order.n_blocks));
  launch_gemm<kept_tokens_gemm<Gemm>, Gemm>(params, params.order.tiles, call.stream,
                                            Tuning{.pdl = true});
}

// Whether two tiles a CTA take no more rounds of the clusters than one tile a CTA.
bool keeps_tokens(const LogitsCall& call) {
  using Order = ChunkTiles<kWidePair.block_m, kWidePair.cluster>;
  const int64_t clusters = std::max(current_device().sms / kWidePair.cluster, 1);
  const auto rounds = [&](int64_t across) {
    return blocks_of(Order::tiles(call.output.T, across), clusters);
  };
  return call.cut.tile == kWide && call.cut.n_blocks > 1 &&
         2 * rounds(blocks_of(call.cut.n_blocks, 2)) <= rounds(call.cut.n_blocks);
}

// Whether CTAs that keep tokens are faster alone, out of step: if a CTA has many tiles one after
// another, unless rows that are not whole lines of L2 make it load too much.
bool keeps_tokens_alone(const LogitsCall& call) {
  constexpr int64_t kLine = 128;
  const auto is_whole = [](const tilemoe_tensor& rows) {
    return rows.stride[0] * static_cast<int64_t>(tilemoe_dtype_size(rows.dtype)) % kLine == 0;
  };
  return call.cut.n_blocks > 2 && is_whole(call.X) && is_whole(call.weight);
}

}  // namespace

void launch_sm90(const LogitsCall& call) {
  with_element(call.X.dtype, [&]<class Element>() {
    if (keeps_tokens(call))
      return keeps_tokens_alone(call) ? launch_kept_tokens<Element, kWide>(call)
                                      : launch_kept_tokens<Element, kWidePair>(call);
    if (call.cut.tile == kWide) return launch<Element, kWidePair>(call);
    return launch<Element, kNarrow>(call);
  });
}

}  // namespace tilemoe::cuda::logits
