// Logits of a router: X weight^T + bias, in one order of the sum for every T and every tile.
//
// The sum over d has chunks of 2048 columns, the last one filled with zeros. The tensor cores sum a
// chunk from zero, 16 columns at a time; chunks are added in float32: ((c0 + c1) + c2) + ... + bias,
// rounded once. Two forms compute the same:
//   one CTA computes all chunks of a tile, one after the other. Between them the running sum is in
//   the CTA's own scratch: the registers hold a single sum. On Hopper by wgmma
//   several CTAs compute the chunks of a tile, if tiles are fewer than SMs, by mma.sync. The last
//   warp to arrive of those with the same part of a tile adds the chunks
//
// A float32 weight is the sum of three bfloat16 terms: its row has, for each 64 columns, those of
// the first term, the second and the third, and each 64 columns of X are multiplied three times.
#include <algorithm>

#include "cuda/core/recipe.h"
#include "cuda/gemm/epilogue/sm80_epilogues.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/load/sm80_rows.h"
#include "cuda/gemm/sm80.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ops/logit_chunks.h"
#include "cuda/ops/router_logits.h"
#include "routing/spec.h"

namespace tilemoe::cuda::logits {
namespace {

// ---------------------------------------------------------------- by mma.sync

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
    float4* sums;       // split (chunks, tiles, kVectors, threads), else (CTAs, kVectors, threads)
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
      add_chunk(D, tile);
  }

 private:
  using Fragment = sm80::OneFragment<Shape>;
  using Sums = ThreadSums<Shape::kThreads>;
  static constexpr int kFragmentVectors = kVectors / Shape::kFragments;

  __device__ Sums sums(int32_t place) const {
    return Sums(params_.sums + int64_t{place} * (kVectors * Shape::kThreads) + threadIdx.x);
  }
  __device__ __forceinline__ void finish(Fragment& sum, int m, const Tile& tile) const {
    params_.output.store(sum[0], tile.row_begin + Shape::fragment_row(m),
                         tile.n_block * Shape::BLOCK_N + Shape::fragment_column());
  }

  // Adds the chunk to those before it. After the last one, stores the logits.
  __device__ __forceinline__ void add_chunk(sm80::Accumulators<Shape>& D, const Tile& tile) const {
    const Sums own = sums(static_cast<int32_t>(blockIdx.x));
    const bool is_last = tile.expert + 1 == params_.chunks;
    sm80::for_each_fragment<Shape>(D, [&](int m, Fragment& fragment) {
      if (tile.expert > 0) own.add_to(m * kFragmentVectors, fragment[0]);
      if (is_last)
        finish(fragment, m, tile);
      else
        own.keep(m * kFragmentVectors, fragment[0]);
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
    const Sums own = sums(tile.expert * params_.tiles + tile.m_block);
    sm80::for_each_fragment<Shape>(D, [&](int m, const Fragment& fragment) {
      own.keep(m * kFragmentVectors, fragment[0]);
      return true;
    });
    if (!arrivals.is_last_warp(static_cast<Counter>(params_.chunks))) return;
#pragma unroll 1
    for (int m = 0; m < Shape::kFragments; ++m) {
      Fragment sum;
      sums(tile.m_block).read(m * kFragmentVectors, sum[0]);
#pragma unroll 1
      for (int32_t chunk = 1; chunk < params_.chunks; ++chunk) {
        Fragment next;
        sums(chunk * params_.tiles + tile.m_block).read(m * kFragmentVectors, next[0]);
        Sums::add(sum[0], next[0]);
#pragma unroll
        for (int i = 0; i < Shape::kWarpColumns / 2; ++i) sum[0][i] = next[0][i];
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
  const typename Gemm::Params params{
      .a = OperandRows::of(call.X, kChunkColumns, call.terms > 1),
      .b = OperandRows::of(call.weight, kChunkColumns * call.terms, false),
      .epilogue = {.sums = call.sums,
                   .counters = call.counters,
                   .stamp = next_stamp(),
                   .tiles = static_cast<int32_t>(cut.tiles),
                   .chunks = static_cast<int32_t>(cut.chunks),
                   .split = cut.split,
                   .output = call.output},
      .order = call.order<Order>()};
  launch_gemm<sm80::grouped_gemm<Gemm>, Gemm>(
      params, cut.split ? cut.tiles * cut.chunks : cut.tiles, call.stream, Tuning{.pdl = true});
}

void launch_sm80(const LogitsCall& call) {
  with_element(call.X.dtype, [&]<class Element>() {
    if (call.cut.tile == kWide) return launch<Element, kWide>(call);
    if (call.cut.tile == kMiddle) return launch<Element, kMiddle>(call);
    if (call.cut.tile == kNarrow) return launch<Element, kNarrow>(call);
    return launch<Element, kFew>(call);
  });
}

// ---------------------------------------------------------------- host

// The terms of a float32 weight as one matrix of rows.
tilemoe_tensor terms_in(char* memory, const tilemoe_tensor& weight, void* stream) {
  const int64_t E = weight.shape[0], blocks = blocks_of(weight.shape[1], kBlockColumns);
  split_weight(weight, memory, static_cast<cudaStream_t>(stream));
  tilemoe_tensor rows{};
  rows.data = memory, rows.dtype = TILEMOE_BFLOAT16, rows.ndim = 2;
  rows.shape[0] = E, rows.shape[1] = blocks * kBlockColumns * kTerms;
  rows.stride[0] = rows.shape[1], rows.stride[1] = 1;
  return rows;
}

int terms_of(tilemoe_dtype weight) {
  return weight == TILEMOE_FLOAT32 ? kTerms : 1;
}
int64_t count(int64_t T, int64_t E, const TileConfiguration& tile) {
  return blocks_of(T, tile.block_m) * blocks_of(E, tile.block_n);
}

struct LogitsScratch {
  char* terms = nullptr;
  float4* sums = nullptr;
  Counter* counters = nullptr;

  LogitsScratch(const Cut& cut, int64_t E, int64_t d, int terms_of_weight, int64_t sms,
                ScratchLayout& layout) {
    if (terms_of_weight > 1)
      terms = layout.take<char>(E * blocks_of(d, kBlockColumns) * kBlockColumns * kTerms * 2);
    if (cut.chunks == 1) return;
    constexpr int64_t kMaxCtas = 4, kMaxWarps = 8;  // of an SM, of a CTA
    const int64_t places = cut.split ? cut.chunks * cut.tiles : std::min(cut.tiles, sms * kMaxCtas);
    sums = layout.take<float4>(places * cut.tile.block_m * cut.tile.block_n / 4);
    if (cut.split) counters = layout.take<Counter>(cut.tiles * kMaxWarps);
  }
};

void check_rows(const char* name, const tilemoe_tensor& rows) {
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(rows.dtype));
  TILEMOE_CHECK_SUPPORTED(
      rows.shape[0] <= 1 || rows.stride[0] <= limits::kMaxRowStrideBytesCuda / element,
      name << " has rows " << rows.stride[0] << " elements apart, the CUDA backend takes "
           << limits::kMaxRowStrideBytesCuda / element);
}

}  // namespace

Cut::Cut(int64_t T, int64_t E, int64_t d, int64_t sms)
    : tile(kWide), chunks(blocks_of(d, kChunkColumns)) {
  const auto padded = [E](const TileConfiguration& of) {
    return blocks_of(E, of.block_n) * of.block_n;
  };
  if (padded(kMiddle) < padded(kWide) || count(T, E, kWide) < sms) tile = kMiddle;
  if (padded(kNarrow) < padded(tile) || count(T, E, tile) < sms) tile = kNarrow;
  split = count(T, E, tile) < sms;
  if (split && count(T, E, tile) * chunks < sms) tile = kFew;
  split = split && chunks > 1;
  n_blocks = blocks_of(E, tile.block_n);
  tiles = count(T, E, tile);
  TILEMOE_CHECK_SUPPORTED(tiles <= INT32_MAX / chunks / 2, "T is " << T << ", E " << E << " and d "
                                                                   << d
                                                                   << ": too many tiles to count");
}

#ifdef TILEMOE_WITHOUT_SM90
void launch_sm90(const LogitsCall& call) {
  launch_sm80(call);
}
#endif

}  // namespace tilemoe::cuda::logits

namespace tilemoe::cuda {

size_t router_logits_scratch_bytes(int64_t T, int64_t E, int64_t d, tilemoe_dtype weight) {
  if (T == 0) return 0;
  const int64_t sms = current_device().sms;
  ScratchLayout layout(nullptr);
  const logits::LogitsScratch scratch(logits::Cut(T, E, d, sms), E, d, logits::terms_of(weight),
                                      sms, layout);
  return layout.used();
}

void router_logits(const tilemoe_router_logits_args& args, bool (*has_wgmma)()) {
  const int64_t T = args.X.shape[0], d = args.X.shape[1], E = args.weight.shape[0];
  const int terms = logits::terms_of(args.weight.dtype);
  TILEMOE_CHECK_SUPPORTED(args.X.dtype != TILEMOE_FLOAT32,
                          "X is float32, the CUDA backend takes bfloat16 or float16");
  TILEMOE_CHECK_SUPPORTED(
      terms == 1 || args.X.dtype == TILEMOE_BFLOAT16,
      "X is " << tilemoe_dtype_name(args.X.dtype)
              << " and weight float32: the CUDA backend takes a "
              << "float32 weight with X in bfloat16, since its terms may overflow float16");
  logits::check_rows("X", args.X);
  logits::check_rows("weight", args.weight);
  if (T == 0) return;
  const int64_t sms = current_device().sms;
  const logits::Cut cut(T, E, d, sms);
  ScratchLayout layout(args.workspace);
  const logits::LogitsScratch scratch(cut, E, d, terms, sms, layout);
  const auto bytes = static_cast<int64_t>(tilemoe_dtype_size(args.logits.dtype));
  const int64_t row_stride = T > 1 ? args.logits.stride[0] : 0;
  const logits::LogitsCall call{
      .X = args.X,
      .weight =
          terms == 1 ? args.weight : logits::terms_in(scratch.terms, args.weight, args.stream),
      .terms = terms,
      .cut = cut,
      .output = {.T = static_cast<int32_t>(T),
                 .E = static_cast<int32_t>(E),
                 .bias = present(args.bias) ? float_array(args.bias)
                                            : FloatArray{nullptr, TILEMOE_FLOAT32},
                 .logits = args.logits.data,
                 .dtype = args.logits.dtype,
                 .row_stride = row_stride,
                 .by_two = E % 2 == 0 && row_stride % 2 == 0 &&
                           reinterpret_cast<uintptr_t>(args.logits.data) % (2 * bytes) == 0},
      .sums = scratch.sums,
      .counters = scratch.counters,
      .stream = args.stream};
  if (!cut.split && cut.tile != logits::kFew && has_wgmma())
    logits::launch_sm90(call);
  else
    logits::launch_sm80(call);
}

}  // namespace tilemoe::cuda
