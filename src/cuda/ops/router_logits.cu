// Logits of a router: X weight^T + bias, in one order of the sum for every T and every tile, by
// mma.sync on every GPU.
//
// The sum over d has chunks of 1024 columns, the last one filled with zeros. A chunk is summed from
// zero, 16 columns at a time; chunks are added in float32: ((c0 + c1) + c2) + ... + bias, rounded
// once. Two forms compute the same:
//   one CTA computes all chunks of a tile, one after the other. Between them the running sum is in
//   the CTA's own scratch: the registers hold a single sum
//   several CTAs compute the chunks of a tile, if tiles are fewer than SMs. Of the warps with the
//   same part of a tile the last one to arrive adds the chunks
//
// A float32 weight is the sum of three bfloat16 terms: its row has, for each 64 columns, those of
// the first term, the second and the third, and each 64 columns of X are multiplied three times.
#include <algorithm>

#include "core/check.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/sm80.h"
#include "cuda/kernels/arrays.h"
#include "cuda/kernels/block.h"
#include "cuda/ops/logit_chunks.h"
#include "cuda/ops/router_logits.h"
#include "routing/spec.h"

namespace tilemoe::cuda {
namespace {

using namespace logits;

int terms_of(tilemoe_dtype weight) {
  return weight == TILEMOE_FLOAT32 ? kTerms : 1;
}

// ---------------------------------------------------------------- float32 weights

struct SplitParams {
  const char* weight;  // (E, d) float32
  int64_t row_bytes;
  uint4* terms;  // (E, blocks, kTerms, 64) bfloat16
  int32_t d, blocks;
  int64_t pieces;  // E * blocks * 8: eight columns each
};

__global__ void __launch_bounds__(256) split_weight(const __grid_constant__ SplitParams params) {
  wait_for_previous();
  const int64_t piece = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (piece >= params.pieces) return;
  constexpr int32_t kPieces = kBlockColumns / 8;
  const int32_t row_pieces = params.blocks * kPieces;
  const int64_t e = piece / row_pieces;
  const auto in_row = static_cast<int32_t>(piece % row_pieces);
  float rest[8] = {};
  if (in_row * 8 < params.d) {
    const auto* const from = reinterpret_cast<const float4*>(params.weight + e * params.row_bytes);
    const float4 low = from[2 * in_row], high = from[2 * in_row + 1];
    rest[0] = low.x, rest[1] = low.y, rest[2] = low.z, rest[3] = low.w;
    rest[4] = high.x, rest[5] = high.y, rest[6] = high.z, rest[7] = high.w;
  }
  uint4* const to =
      params.terms + (e * params.blocks + in_row / kPieces) * kTerms * kPieces + in_row % kPieces;
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    const uint4 words = pack_eight<__nv_bfloat16>(rest);
    to[term * kPieces] = words;
    float rounded[8];
    unpack_eight<__nv_bfloat16>(words, rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i)  // nothing is left of what is not finite
      rest[i] = rounded[i] - rounded[i] == 0.f ? rest[i] - rounded[i] : 0.f;
  }
}

// ---------------------------------------------------------------- host

constexpr TileConfiguration kWide{128, 256}, kMiddle{128, 128}, kNarrow{128, 64}, kFew{16, 32};

template <class Element, TileConfiguration kTile>
struct Parts {
  using Shape = sm80::TileShape<SixteenBit<Element>, kTile>;
  using Epilogue = LogitsEpilogue<Shape>;
  using Order = ChunkTiles<Shape>;
  using Gemm =
      sm80::GroupedGemm<Shape, ChunkRows<Shape, true>, ChunkRows<Shape, false>, Epilogue, Order>;
};

// How a call is cut: the results do not depend on it.
struct Cut {
  TileConfiguration tile;
  int64_t n_blocks, tiles, chunks;
  bool split;

  Cut(int64_t T, int64_t E, int64_t d, const DeviceInfo& device)
      : tile(kWide), chunks(blocks_of(d, kChunkColumns)) {
    const int64_t sms = device.sms;
    const auto padded = [E](const TileConfiguration& of) {
      return blocks_of(E, of.block_n) * of.block_n;
    };
    if (padded(kMiddle) < padded(kWide) || count(T, E, kWide) < sms) tile = kMiddle;
    if (padded(kNarrow) < padded(tile) || count(T, E, tile) < sms) tile = kNarrow;
    split = count(T, E, tile) < sms;
    if (split && count(T, E, tile) * chunks < sms) tile = kFew;
    n_blocks = blocks_of(E, tile.block_n);
    tiles = count(T, E, tile);
    split = split && chunks > 1;
    TILEMOE_CHECK_SUPPORTED(
        tiles <= INT32_MAX / chunks / 2,
        "T is " << T << ", E " << E << " and d " << d << ": too many tiles to count");
  }
  static int64_t count(int64_t T, int64_t E, const TileConfiguration& of) {
    return blocks_of(T, of.block_m) * blocks_of(E, of.block_n);
  }
};

template <class Element, class Body>
void with_parts(const TileConfiguration& tile, const Body& body) {
  if (tile == kWide) return body.template operator()<Parts<Element, kWide>>();
  if (tile == kMiddle) return body.template operator()<Parts<Element, kMiddle>>();
  if (tile == kNarrow) return body.template operator()<Parts<Element, kNarrow>>();
  return body.template operator()<Parts<Element, kFew>>();
}

struct LogitsScratch {
  char* terms = nullptr;  // (E, blocks, kTerms, 64) bfloat16
  float4* sums = nullptr;
  Counter* counters = nullptr;

  LogitsScratch(const Cut& cut, int64_t E, int64_t d, int terms_of_weight, const DeviceInfo& device,
                ScratchLayout& layout) {
    if (terms_of_weight > 1)
      terms = layout.take<char>(E * blocks_of(d, kBlockColumns) * kBlockColumns * kTerms * 2);
    if (cut.chunks == 1) return;
    with_parts<__nv_bfloat16>(cut.tile, [&]<class P>() {
      using Gemm = typename P::Gemm;
      const int64_t at_once = int64_t{device.sms} * Gemm::kBlocksAtOnce;
      const int64_t places = cut.split ? cut.chunks * cut.tiles : std::min(cut.tiles, at_once);
      sums = layout.take<float4>(places * P::Epilogue::kVectors * Gemm::kThreads);
      if (cut.split) counters = layout.take<Counter>(cut.tiles * (Gemm::kThreads / kWarp));
    });
  }
};

// The terms of a float32 weight as one matrix of rows.
tilemoe_tensor split(const tilemoe_tensor& weight, char* terms, cudaStream_t stream) {
  const int64_t E = weight.shape[0], d = weight.shape[1], blocks = blocks_of(d, kBlockColumns);
  const SplitParams params{.weight = static_cast<const char*>(weight.data),
                           .row_bytes = E > 1 ? weight.stride[0] * int64_t{sizeof(float)} : 0,
                           .terms = reinterpret_cast<uint4*>(terms),
                           .d = static_cast<int32_t>(d),
                           .blocks = static_cast<int32_t>(blocks),
                           .pieces = E * blocks * (kBlockColumns / 8)};
  launch_pdl<split_weight>({.device = current_device(),
                            .blocks = dim3(static_cast<unsigned>(blocks_of(params.pieces, 256))),
                            .threads = 256,
                            .stream = stream},
                           params);
  tilemoe_tensor rows{};
  rows.data = terms, rows.dtype = TILEMOE_BFLOAT16, rows.ndim = 2;
  rows.shape[0] = E, rows.shape[1] = blocks * kBlockColumns * kTerms;
  rows.stride[0] = rows.shape[1], rows.stride[1] = 1;
  return rows;
}

template <class P>
void launch(const tilemoe_router_logits_args& args, const tilemoe_tensor& weight, const Cut& cut,
            const LogitsScratch& scratch, int terms) {
  using Gemm = typename P::Gemm;
  const int64_t T = args.X.shape[0], d = args.X.shape[1], E = weight.shape[0];
  const int64_t blocks = blocks_of(d, kBlockColumns);
  const auto chunks = static_cast<int32_t>(cut.chunks), tiles = static_cast<int32_t>(cut.tiles);
  const auto in_last = static_cast<int32_t>(blocks - (cut.chunks - 1) * kChunkBlocks);
  const auto bytes = static_cast<int64_t>(tilemoe_dtype_size(args.logits.dtype));
  const int64_t row_stride = T > 1 ? args.logits.stride[0] : 0;
  const bool by_two = E % 2 == 0 && row_stride % 2 == 0 &&
                      reinterpret_cast<uintptr_t>(args.logits.data) % (2 * bytes) == 0;
  OperandRows of_weight = OperandRows::of(weight, false);
  of_weight.chunk_bytes *= terms;
  const typename Gemm::Params params{
      .a = OperandRows::of(args.X, terms > 1),
      .b = of_weight,
      .epilogue = {.sums = scratch.sums,
                   .counters = scratch.counters,
                   .stamp = next_stamp(),
                   .T = static_cast<int32_t>(T),
                   .E = static_cast<int32_t>(E),
                   .tiles = tiles,
                   .chunks = chunks,
                   .split = cut.split,
                   .bias = present(args.bias) ? float_array(args.bias)
                                              : FloatArray{nullptr, TILEMOE_FLOAT32},
                   .logits = args.logits.data,
                   .dtype = args.logits.dtype,
                   .row_stride = row_stride,
                   .by_two = by_two},
      .order = {.T = static_cast<int32_t>(T),
                .n_blocks = static_cast<int32_t>(cut.n_blocks),
                .tiles = tiles,
                .chunks = chunks,
                .k_blocks = static_cast<int32_t>(kChunkBlocks) * terms,
                .last_k_blocks = in_last * terms,
                .split = cut.split}};
  launch_gemm<sm80::grouped_gemm<Gemm>, Gemm>(
      params, cut.split ? cut.tiles * cut.chunks : cut.tiles, args.stream, Tuning{.pdl = true});
}

}  // namespace

size_t router_logits_scratch_bytes(int64_t T, int64_t E, int64_t d, tilemoe_dtype weight) {
  if (T == 0) return 0;
  const DeviceInfo& device = current_device();
  ScratchLayout layout(nullptr);
  const LogitsScratch scratch(Cut(T, E, d, device), E, d, terms_of(weight), device, layout);
  return layout.used();
}

void router_logits(const tilemoe_router_logits_args& args) {
  const int64_t T = args.X.shape[0], d = args.X.shape[1], E = args.weight.shape[0];
  const int terms = terms_of(args.weight.dtype);
  TILEMOE_CHECK_SUPPORTED(args.X.dtype != TILEMOE_FLOAT32,
                          "X is float32, the CUDA backend takes bfloat16 or float16");
  TILEMOE_CHECK_SUPPORTED(
      terms == 1 || args.X.dtype == TILEMOE_BFLOAT16,
      "X is " << tilemoe_dtype_name(args.X.dtype)
              << " and weight float32: the CUDA backend takes a "
              << "float32 weight with X in bfloat16, since its terms may overflow float16");
  if (T == 0) return;
  const DeviceInfo& device = current_device();
  const Cut cut(T, E, d, device);
  ScratchLayout layout(args.workspace);
  const LogitsScratch scratch(cut, E, d, terms, device, layout);
  const tilemoe_tensor weight =
      terms == 1 ? args.weight
                 : split(args.weight, scratch.terms, static_cast<cudaStream_t>(args.stream));
  with_element(args.X.dtype, [&]<class Element>() {
    with_parts<Element>(cut.tile, [&]<class P>() { launch<P>(args, weight, cut, scratch, terms); });
  });
}

}  // namespace tilemoe::cuda
