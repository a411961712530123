// Rows times a scale and their scores, rounded: P of an adapter, for the gradient of its B.
#include <cstdint>

#include "core/check.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // columns of a thread: 16 bytes

struct ScaleParams {
  const int32_t* offsets;  // (E + 1)
  int32_t E;
  int32_t vectors;  // of a row
  const char* from;
  int64_t from_bytes;  // of a row
  char* to;
  int64_t to_bytes;
  float scale;
  const float* score;  // (capacity); null: 1
};

// A CTA has whole rows, and each of its threads one vector of a row.
template <class Element>
__global__ void __launch_bounds__(kThreads) scale_vectors(const ScaleParams params) {
  wait_for_previous();
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t rows = kThreads / params.vectors, in_block = thread / params.vectors;
  const int64_t row = int64_t{blockIdx.x} * rows + in_block;
  if (in_block >= rows || row >= params.offsets[params.E]) return;
  const int32_t byte = (thread - in_block * params.vectors) * 16;
  float x[kVector];
  unpack_eight<Element>(ptx::load_global_16(params.from + row * params.from_bytes + byte), x);
  const float scale = params.score != nullptr ? params.scale * params.score[row] : params.scale;
#pragma unroll
  for (float& number : x) number *= scale;
  *reinterpret_cast<uint4*>(params.to + row * params.to_bytes + byte) = pack_eight<Element>(x);
}

}  // namespace

void scale_rows(const ScaledRows& scaled) {
  constexpr int64_t kElementBytes = 2;
  const int64_t capacity = scaled.rows.capacity, vectors = scaled.from.shape[1] / kVector;
  TILEMOE_ASSERT(scaled.from.shape[1] % kVector == 0 && vectors >= 1 && vectors <= kThreads,
                 scaled.from.shape[1] << " columns");
  if (capacity == 0) return;
  const int64_t rows_of_block = kThreads / vectors;
  const ScaleParams params{.offsets = scaled.rows.offsets,
                           .E = static_cast<int32_t>(scaled.rows.E),
                           .vectors = static_cast<int32_t>(vectors),
                           .from = static_cast<const char*>(scaled.from.data),
                           .from_bytes = scaled.from.stride[0] * kElementBytes,
                           .to = static_cast<char*>(scaled.to.data),
                           .to_bytes = scaled.to.stride[0] * kElementBytes,
                           .scale = scaled.scale,
                           .score = scaled.score};
  const PdlLaunch where{
      .device = scaled.device,
      .blocks = static_cast<unsigned>((capacity + rows_of_block - 1) / rows_of_block),
      .threads = kThreads,
      .stream = static_cast<cudaStream_t>(scaled.stream)};
  with_element(scaled.from.dtype,
               [&]<class Element>() { launch_pdl<scale_vectors<Element>>(where, params); });
}

}  // namespace tilemoe::cuda
