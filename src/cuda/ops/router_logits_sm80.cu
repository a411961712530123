// router_logits by mma.sync, in both forms: one CTA computes all chunks of a tile, or several do.
#include "cuda/core/recipe.h"
#include "cuda/gemm/epilogue/sm80_epilogues.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/load/sm80_rows.h"
#include "cuda/gemm/sm80.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ops/logit_chunks.h"

namespace tilemoe::cuda::logits {
namespace {

// A matrix of rows as an operand, K-major. Rows and columns past the last are zeros.
struct OperandRows {
  const char* data;
  uint32_t row_bytes;  // from one row to the next
  int32_t rows, width_bytes, chunk_bytes;
  bool repeats;  // each k block is multiplied kTerms times

  static OperandRows of(const tilemoe_tensor& matrix, int64_t chunk_columns, bool repeats) {
    const auto element = static_cast<int64_t>(tilemoe_dtype_size(matrix.dtype));
    return {
        .data = static_cast<const char*>(matrix.data),
        .row_bytes = matrix.shape[0] > 1 ? static_cast<uint32_t>(matrix.stride[0] * element) : 0,
        .rows = static_cast<int32_t>(matrix.shape[0]),
        .width_bytes = static_cast<int32_t>(matrix.shape[1] * element),
        .chunk_bytes = static_cast<int32_t>(chunk_columns * element),
        .repeats = repeats};
  }
};

// Operand A (tokens) or B (experts) of a chunk.
template <class Shape, bool kIsA>
class ChunkRows {
 public:
  static constexpr int kRows = kIsA ? Shape::BLOCK_M : Shape::BLOCK_N;
  using Operand = StagedOperand<Major::kK, kRows>;
  using Params = OperandRows;

  __device__ ChunkRows(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    const int32_t row = (kIsA ? tile.row_begin : tile.n_block * kRows) + stage_.row();
    const int32_t byte = tile.expert * params_.chunk_bytes + stage_.byte();
    from_ = params_.data + int64_t{row} * params_.row_bytes + byte;
    rows_left_ = params_.rows - row;
    bytes_left_ = params_.width_bytes - byte;
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t /*blocks_left*/) const {
    const uint32_t pass_bytes = params_.row_bytes * Stage::kAtOnce;
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i)
      stage_.copy(shared, i, from_ + static_cast<uint64_t>(pass_bytes) * static_cast<uint32_t>(i),
                  bytes_left_ > 0 && rows_left_ > i * Stage::kAtOnce);
  }
  __device__ __forceinline__ void advance(int32_t blocks_left) {
    if (params_.repeats && (blocks_left - 1) % kTerms != 0) return;
    from_ += Stage::kRowBytes;
    bytes_left_ -= Stage::kRowBytes;
  }

 private:
  using Stage = sm80::StageRows<Shape::kThreads, kRows>;

  const Params& params_;
  Stage stage_;
  const char* from_;  // this thread's piece of the next k block, in its first row
  int32_t rows_left_, bytes_left_;
};

template <class Shape>
class ChunkSums {
 public:
  // A thread's numbers of a tile, 16 bytes each.
  static constexpr int kVectors = Shape::kFragments * Shape::kWarpColumns / 8;

  struct Params {
    float4* sums;       // split: (chunks, tiles, kVectors, threads), else (CTAs, kVectors, threads)
    Counter* counters;  // split: (tiles, warps)
    Counter stamp;
    int32_t tiles, chunks;
    bool split;
    Output output;
  };

  __device__ explicit ChunkSums(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.row_begin + Shape::fragment_row(0) < params_.output.T &&
           tile.n_block * Shape::BLOCK_N + Shape::fragment_column() < params_.output.E;
  }

  __device__ __forceinline__ void store(sm80::Accumulators<Shape>& D, const Tile& tile) const {
    if (!wants(tile)) return;
    if (params_.split)
      store_chunk(D, tile);
    else
      add_to_sum(D, tile);
  }

 private:
  using Fragment = sm80::OneFragment<Shape>;
  static constexpr int kNumbers = Shape::kWarpColumns / 2;  // of a thread's fragment
  static constexpr int kFragmentVectors = kNumbers / 4;

  // This thread's place for fragment m of a tile's sum: 16 bytes of all threads, then the next.
  __device__ float4* place(int32_t number, int m) const {
    return params_.sums + threadIdx.x +
           (int64_t{number} * kVectors + m * kFragmentVectors) * Shape::kThreads;
  }
  __device__ int32_t number_of(int32_t chunk, const Tile& tile) const {
    return chunk * params_.tiles + tile.m_block;
  }
  __device__ __forceinline__ static void read(float (&numbers)[kNumbers], const float4* from) {
#pragma unroll
    for (int i = 0; i < kFragmentVectors; ++i)
      reinterpret_cast<float4&>(numbers[4 * i]) = __ldcg(from + i * Shape::kThreads);
  }
  __device__ __forceinline__ static void write(float4* to, const float (&numbers)[kNumbers]) {
#pragma unroll
    for (int i = 0; i < kFragmentVectors; ++i)
      to[i * Shape::kThreads] = {numbers[4 * i], numbers[4 * i + 1], numbers[4 * i + 2],
                                 numbers[4 * i + 3]};
  }
  __device__ __forceinline__ void finish(Fragment& sum, int m, const Tile& tile) const {
    params_.output.store(sum[0], tile.row_begin + Shape::fragment_row(m),
                         tile.n_block * Shape::BLOCK_N + Shape::fragment_column());
  }

  // Adds the chunk to those before it. After the last one, stores the logits.
  __device__ __forceinline__ void add_to_sum(sm80::Accumulators<Shape>& D, const Tile& tile) const {
    const bool is_first = tile.expert == 0, is_last = tile.expert + 1 == params_.chunks;
    sm80::for_each_fragment<Shape>(D, [&](int m, const Fragment& chunk) {
      float4* const own = place(static_cast<int32_t>(blockIdx.x), m);
      Fragment sum;
      if (!is_first) read(sum[0], own);
      add_chunk(sum[0], chunk[0], is_first);
      if (is_last)
        finish(sum, m, tile);
      else
        write(own, sum[0]);
      return true;
    });
  }

  // Stores the chunk. The last warp with this part of the tile adds all chunks.
  __device__ __forceinline__ void store_chunk(sm80::Accumulators<Shape>& D,
                                              const Tile& tile) const {
    constexpr int kWarps = Shape::kThreads / kWarp;
    const Arrivals arrivals(params_.counters + int64_t{tile.m_block} * kWarps + threadIdx.x / kWarp,
                            params_.stamp);
    arrivals.open_by_warp();
    sm80::for_each_fragment<Shape>(D, [&](int m, const Fragment& fragment) {
      write(place(number_of(tile.expert, tile), m), fragment[0]);
      return true;
    });
    if (!arrivals.is_last_warp(static_cast<Counter>(params_.chunks))) return;
    // Chunks that are read before the first of them is added.
    constexpr int kAtOnce = Shape::kSmallM ? 4 : 1;
#pragma unroll 1
    for (int m = 0; m < Shape::kFragments; ++m) {
      Fragment sum;
#pragma unroll 1
      for (int32_t first = 0; first < params_.chunks; first += kAtOnce) {
        float chunks[kAtOnce][kNumbers];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (first + i < params_.chunks) read(chunks[i], place(number_of(first + i, tile), m));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (first + i < params_.chunks) add_chunk(sum[0], chunks[i], first + i == 0);
      }
      finish(sum, m, tile);
    }
  }

  const Params& params_;
};

template <class Element, TileConfiguration kTile>
void launch(const LogitsCall& call) {
  using Shape = sm80::TileShape<SixteenBit<Element>, kTile>;
  using Order = ChunkTiles<Shape::BLOCK_M>;
  using Gemm = sm80::GroupedGemm<Shape, ChunkRows<Shape, true>, ChunkRows<Shape, false>,
                                 ChunkSums<Shape>, Order>;
  const Cut& cut = call.cut;
  const auto order = call.order<Order>();
  const typename Gemm::Params params{
      .a = OperandRows::of(call.X, kChunkColumns, call.terms > 1),
      .b = OperandRows::of(call.weight, kChunkColumns * call.terms, false),
      .epilogue = {.sums = call.sums,
                   .counters = call.counters,
                   .stamp = next_stamp(),
                   .tiles = order.tiles,
                   .chunks = static_cast<int32_t>(cut.chunks),
                   .split = cut.split,
                   .output = call.output},
      .order = order};
  launch_gemm<sm80::grouped_gemm<Gemm>, Gemm>(params,
                                              int64_t{order.tiles} * (cut.split ? cut.chunks : 1),
                                              call.stream, Tuning{.pdl = true});
}

}  // namespace

void launch_sm80(const LogitsCall& call) {
  with_element(call.X.dtype, [&]<class Element>() {
    if (call.cut.tile == kWide) return launch<Element, kWide>(call);
    if (call.cut.tile == kNarrow) return launch<Element, kNarrow>(call);
    return launch<Element, kFew>(call);
  });
}

}  // namespace tilemoe::cuda::logits
