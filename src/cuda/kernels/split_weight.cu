// A float32 router weight as bfloat16 terms, each the rounding of what is left by those before it:
// three have its 24 bits. One thread splits eight numbers.
#include "core/check.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;

struct SplitParams {
  const char* weight;  // (E, d) float32
  int64_t row_bytes;
  uint4* terms;  // (E, blocks, kWeightTerms, 64) bfloat16
  int32_t d, blocks;
  int64_t pieces;  // E * blocks * 8: eight columns each
};

__global__ void __launch_bounds__(kThreads)
    split_weight_by_threads(const __grid_constant__ SplitParams params) {
  wait_for_previous();
  const int64_t piece = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (piece >= params.pieces) return;
  constexpr int32_t kPieces = kTermColumns / 8;
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
  uint4* const to = params.terms + (e * params.blocks + in_row / kPieces) * kWeightTerms * kPieces +
                    in_row % kPieces;
#pragma unroll
  for (int term = 0; term < kWeightTerms; ++term) {
    const uint4 words = pack_eight<__nv_bfloat16>(rest);
    to[term * kPieces] = words;
    float rounded[8];
    unpack_eight<__nv_bfloat16>(words, rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i)  // nothing is left of what is not finite
      rest[i] = rounded[i] - rounded[i] == 0.f ? rest[i] - rounded[i] : 0.f;
  }
}

}  // namespace

void split_weight(const tilemoe_tensor& weight, void* terms, cudaStream_t stream) {
  const int64_t E = weight.shape[0], d = weight.shape[1], blocks = blocks_of(d, kTermColumns);
  const SplitParams params{.weight = static_cast<const char*>(weight.data),
                           .row_bytes = E > 1 ? weight.stride[0] * int64_t{sizeof(float)} : 0,
                           .terms = static_cast<uint4*>(terms),
                           .d = static_cast<int32_t>(d),
                           .blocks = static_cast<int32_t>(blocks),
                           .pieces = E * blocks * (kTermColumns / 8)};
  launch_pdl<split_weight_by_threads>(
      {.device = current_device(),
       .blocks = dim3(static_cast<unsigned>(blocks_of(params.pieces, kThreads))),
       .threads = kThreads,
       .stream = stream},
      params);
}

}  // namespace tilemoe::cuda
