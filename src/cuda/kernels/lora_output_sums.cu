#include <algorithm>

#include "core/dtype.h"
#include "core/numbers.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/core/row_chunks.h"
#include "cuda/kernels/lora_output_sums.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // columns of Q that a thread has

template <class Element>
__global__ void __launch_bounds__(kThreads) add_slices(const OutputSums sums) {
  wait_for_previous();
  const int32_t vectors = sums.rank / kVector;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = i / vectors;
  if (row >= sums.offsets[sums.E]) return;
  const auto rank = static_cast<int32_t>(i - row * vectors) * kVector;
  float sum[kVector] = {};
  for (int32_t s = 0; s < sums.slices; ++s) {
    const auto* const from = reinterpret_cast<const float4*>(
        sums.Q_slices + (s * sums.capacity + row) * sums.rank + rank);
    const float4 low = from[0], high = from[1];
    const float x[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] += x[j];
  }
  *reinterpret_cast<uint4*>(static_cast<Element*>(sums.Q) + row * sums.Q_row + rank) =
      pack_eight<Element>(sum);
}

struct ChunkParams {
  OutputSums sums;
  OutputPart part[2];
};

// A thread has a column of an expert.
template <class Out>
__global__ void __launch_bounds__(kThreads) add_chunks(const ChunkParams params) {
  constexpr int kRanks = 4;  // at once
  wait_for_previous();
  const OutputSums& sums = params.sums;
  const OutputPart& part = params.part[blockIdx.z];
  const auto expert = static_cast<int32_t>(blockIdx.x);
  const auto column = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x);
  const int32_t rows = sums.offsets[expert + 1] - sums.offsets[expert];
  if (column >= part.count || (rows == 0 && part.accumulate)) return;
  const int32_t chunks = count_chunks(rows, sums.chunk_rows);
  if (chunks == 1 && sums.stores_dB) return;
  const int64_t chunk_size = int64_t{sums.rank} * sums.width;
  const float* const from = sums.dB_chunks +
                            first_chunk(sums.offsets, expert, sums.chunk_rows) * chunk_size +
                            part.first + column;
  Out* const out = static_cast<Out*>(part.dB) + expert * part.expert + column * part.column;
  for (int32_t rank = 0; rank < sums.rank; rank += kRanks) {
    float sum[kRanks] = {};
#pragma unroll 2
    for (int32_t chunk = 0; chunk < chunks; ++chunk)
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
        sum[r] += from[chunk * chunk_size + int64_t{rank + r} * sums.width];
    if (part.vectors) {
      auto* const four = reinterpret_cast<float4*>(reinterpret_cast<float*>(out) + rank);
      if (part.accumulate) {
        const float4 before = *four;
        sum[0] += before.x, sum[1] += before.y, sum[2] += before.z, sum[3] += before.w;
      }
      *four = {sum[0], sum[1], sum[2], sum[3]};
      continue;
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      Out& number = out[(rank + r) * part.rank];
      store(part.accumulate ? to_float(number) + sum[r] : sum[r], number);
    }
  }
}

OutputPart part_of(const LoraGradient::Part& from, bool accumulate) {
  const tilemoe_tensor& dB = from.dB;
  return {.dB = dB.data,
          .expert = dB.stride[0],
          .column = dB.stride[1],
          .rank = dB.stride[2],
          .first = static_cast<int32_t>(from.first),
          .count = static_cast<int32_t>(dB.shape[1]),
          .dtype = dB.dtype,
          .accumulate = accumulate,
          .vectors = dB.dtype == TILEMOE_FLOAT32 && dB.stride[2] == 1 && dB.stride[0] % 4 == 0 &&
                     dB.stride[1] % 4 == 0 && reinterpret_cast<uintptr_t>(dB.data) % 16 == 0};
}

}  // namespace

void add_slices_of_Q(const OutputSums& sums, tilemoe_dtype dtype, const DeviceInfo& device,
                     cudaStream_t stream) {
  const int64_t vectors = sums.capacity * (sums.rank / kVector);
  const PdlLaunch where{.device = device,
                        .blocks = static_cast<unsigned>((vectors + kThreads - 1) / kThreads),
                        .threads = kThreads,
                        .stream = stream};
  with_element(dtype, [&]<class Element>() { launch_pdl<add_slices<Element>>(where, sums); });
}

OutputParts parts_of(const LoraGradient& gradient) {
  OutputParts parts{};
  for (int p = 0; p < gradient.parts; ++p)
    if (present(gradient.part[p].dB))
      parts.part[parts.count++] = part_of(gradient.part[p], gradient.accumulate);
  return parts;
}

void add_chunks_of_dB(const OutputSums& sums, const OutputParts& parts, const DeviceInfo& device,
                      cudaStream_t stream) {
  // A launch has parts of one dtype.
  for (int32_t first = 0, end; first < parts.count; first = end) {
    ChunkParams params{.sums = sums, .part = {}};
    const tilemoe_dtype dtype = parts.part[first].dtype;
    int32_t columns = 0;
    for (end = first; end < parts.count && parts.part[end].dtype == dtype; ++end) {
      params.part[end - first] = parts.part[end];
      columns = std::max(columns, parts.part[end].count);
    }
    const PdlLaunch where{.device = device,
                          .blocks = dim3(static_cast<unsigned>(sums.E),
                                         static_cast<unsigned>((columns + kThreads - 1) / kThreads),
                                         static_cast<unsigned>(end - first)),
                          .threads = kThreads,
                          .stream = stream};
    with_float(dtype, [&]<class Out>() { launch_pdl<add_chunks<Out>>(where, params); });
  }
}

}  // namespace tilemoe::cuda
