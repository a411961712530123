// Logits of a router: X weight^T + bias, in one order of the sum for every T and every tile.
//
// The sum over d has chunks of 512 columns, the last one filled with zeros. The tensor cores sum a
// chunk from zero, 16 columns at a time; chunks are added in float32: ((c0 + c1) + c2) + ... + bias,
// rounded once. Two forms compute the same:
//   one CTA computes all chunks of a tile, one after the other: on Hopper by wgmma, with the running
//   sum in registers, otherwise by mma.sync, with the running sum in the CTA's own scratch
//   several CTAs compute the chunks of a tile, if tiles are fewer than SMs, by mma.sync. The last
//   warp to arrive of those with the same part of a tile adds the chunks
//
// A float32 weight is the sum of three bfloat16 terms: its row has, for each 64 columns, those of
// the first term, the second and the third, and each 64 columns of X are multiplied three times.
#include <algorithm>

#include "cuda/kernels/kernels.h"
#include "cuda/ops/logit_chunks.h"
#include "cuda/ops/router_logits.h"
#include "routing/spec.h"

namespace tilemoe::cuda::logits {
namespace {

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
// Tiles of the logits.
int64_t count(int64_t T, int64_t E, const TileConfiguration& tile) {
  return blocks_of(T, tile.block_m) * blocks_of(E, tile.block_n);
}

struct LogitsScratch {
  char* terms = nullptr;
  float4* sums = nullptr;
  Counter* counters = nullptr;

  LogitsScratch(const Cut& cut, int64_t T, int64_t E, int64_t d, int terms_of_weight, int64_t sms,
                ScratchLayout& layout) {
    if (terms_of_weight > 1)
      terms = layout.take<char>(E * blocks_of(d, kBlockColumns) * kBlockColumns * kTerms * 2);
    if (cut.chunks == 1) return;
    constexpr int64_t kMaxCtas = 4, kMaxWarps = 8;  // of an SM, of a CTA
    const int64_t tiles = count(T, E, cut.tile);
    const int64_t places = cut.split ? cut.chunks * tiles : std::min(tiles, sms * kMaxCtas);
    sums = layout.take<float4>(places * cut.tile.block_m * cut.tile.block_n / 4);
    if (cut.split) counters = layout.take<Counter>(tiles * kMaxWarps);
  }
};

void check_rows(const char* name, const tilemoe_tensor& rows) {
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(rows.dtype));
  TILEMOE_CHECK_SUPPORTED(
      rows.shape[0] <= 1 || rows.stride[0] <= limits::kMaxRowStrideBytesCuda / element,
      name << " has a row stride of " << rows.stride[0] << " elements, expected at most "
           << limits::kMaxRowStrideBytesCuda / element << " on CUDA");
}

}  // namespace

Cut::Cut(int64_t T, int64_t E, int64_t d, int64_t sms)
    : tile(kWide), chunks(blocks_of(d, kChunkColumns)) {
  const auto padded = [E](const TileConfiguration& of) {
    return blocks_of(E, of.block_n) * of.block_n;
  };
  const auto rounds = [=](const TileConfiguration& of) { return blocks_of(count(T, E, of), sms); };
  // Two narrow tiles take about 15/14 of the time of a wide one, and may fill the last round better.
  const bool fills = E <= kWide.block_n && 15 * rounds(kNarrow) < 14 * 2 * rounds(kWide);
  if (padded(kNarrow) < padded(kWide) || count(T, E, kWide) < sms || fills) tile = kNarrow;
  split = count(T, E, tile) < sms;
  if (split && count(T, E, tile) * chunks < sms) tile = kFew;
  split = split && chunks > 1;
  n_blocks = blocks_of(E, tile.block_n);
  TILEMOE_CHECK_SUPPORTED(
      count(T, E, tile) <= INT32_MAX / chunks / 2,
      "T is " << T << ", E " << E << " and d " << d << ": too many tiles to count");
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
  const logits::LogitsScratch scratch(logits::Cut(T, E, d, sms), T, E, d, logits::terms_of(weight),
                                      sms, layout);
  return layout.used();
}

void router_logits(const tilemoe_router_logits_args& args, bool (*has_wgmma)()) {
  const int64_t T = args.X.shape[0], d = args.X.shape[1], E = args.weight.shape[0];
  const int terms = logits::terms_of(args.weight.dtype);
  TILEMOE_CHECK_SUPPORTED(args.X.dtype != TILEMOE_FLOAT32,
                          "X is float32, expected bfloat16 or float16 on CUDA");
  TILEMOE_CHECK_SUPPORTED(
      terms == 1 || args.X.dtype == TILEMOE_BFLOAT16,
      "X is " << tilemoe_dtype_name(args.X.dtype)
              << ", expected bfloat16: on CUDA the terms of a float32 weight may overflow float16");
  logits::check_rows("X", args.X);
  logits::check_rows("weight", args.weight);
  if (T == 0) return;
  const int64_t sms = current_device().sms;
  const logits::Cut cut(T, E, d, sms);
  ScratchLayout layout(args.workspace);
  const logits::LogitsScratch scratch(cut, T, E, d, terms, sms, layout);
  const auto bytes = static_cast<int64_t>(tilemoe_dtype_size(args.logits.dtype));
  const int64_t row_stride = T > 1 ? args.logits.stride[0] : 0;
  const auto place = reinterpret_cast<uintptr_t>(args.logits.data);
  const bool by_16_bytes = args.logits.dtype == args.X.dtype && !present(args.bias) && E % 8 == 0 &&
                           row_stride % 8 == 0 && place % 16 == 0;
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
                 .by_two = E % 2 == 0 && row_stride % 2 == 0 && place % (2 * bytes) == 0},
      .rows = by_16_bytes ? args.logits : tilemoe_tensor{},
      .sums = scratch.sums,
      .counters = scratch.counters,
      .stream = args.stream};
  if (!cut.split && cut.tile != logits::kFew && has_wgmma())
    logits::launch_sm90(call);
  else
    logits::launch_sm80(call);
}

}  // namespace tilemoe::cuda
