// db2_e = sum of s dO, db1_e = sum of dH, over the expert's rows, by chunks of rows.
#include <algorithm>

#include "core/check.h"
#include "core/numbers.h"
#include "cuda/core/device.h"
#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/core/row_chunks.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 256;  // of a chunk: at d = 4096 a chunk's sums are 1 / 128 of its bytes
constexpr int kAtOnce = 8;  // rows whose loads are in flight together
constexpr int kVector = 8;  // columns of a thread: 16 bytes

struct ChunkSums {
  const int32_t* offsets;  // (E + 1)
  const int32_t* token;    // (capacity) row of `rows`; null: row r is row r
  const float* score;      // (capacity); null: 1
  const char* rows;        // (T or capacity, width)
  int64_t row_bytes;
  int32_t E;
  int32_t width;
  float* partial;  // (max_chunks, width)
};

// A CTA sums kThreads * kVector columns of one chunk.
template <class Element>
__global__ void __launch_bounds__(kThreads) sum_chunks(const ChunkSums params) {
  const auto chunk = static_cast<int32_t>(blockIdx.x);
  const auto [expert, begin, rows] = find_chunk(params.offsets, params.E, kRows, chunk);
  const int32_t column = static_cast<int32_t>(blockIdx.y * kThreads + threadIdx.x) * kVector;
  if (rows <= 0 || column >= params.width) return;

  float sum[kVector] = {};
  for (int32_t first = 0; first < rows; first += kAtOnce) {
    uint4 value[kAtOnce];
    float scale[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= rows) break;
      const int64_t row = begin + first + i;
      const int64_t source = params.token != nullptr ? params.token[row] : row;
      value[i] = ptx::load_global_once_16(params.rows + source * params.row_bytes +
                                          column * sizeof(Element));
      scale[i] = params.score != nullptr ? params.score[row] : 1.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= rows) break;
      float x[kVector];
      unpack_eight<Element>(value[i], x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] = fmaf(scale[i], x[j], sum[j]);
    }
  }
  auto* out = reinterpret_cast<float4*>(params.partial + int64_t{chunk} * params.width + column);
  out[0] = {sum[0], sum[1], sum[2], sum[3]};
  out[1] = {sum[4], sum[5], sum[6], sum[7]};
}

// Where the sums of columns [begin, begin + count) go, in one bias or in half of one.
struct BiasColumns {
  tilemoe_dtype dtype;
  void* data;
  int64_t stride;  // elements, from expert to expert
  int32_t begin, count;
  int32_t step;  // elements, from column to column
};

// A thread adds up one column of one expert.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    add_chunks(const ChunkSums params, const BiasColumns columns, bool accumulate) {
  const auto blocks = static_cast<unsigned>((columns.count + kThreads - 1) / kThreads);
  const auto column = static_cast<int32_t>(blockIdx.x % blocks * kThreads + threadIdx.x);
  const auto expert = static_cast<int32_t>(blockIdx.x / blocks);
  const int32_t rows = params.offsets[expert + 1] - params.offsets[expert];
  if (column >= columns.count || (rows == 0 && accumulate)) return;
  const int32_t chunks = count_chunks(rows, kRows);
  const float* partial = params.partial +
                         int64_t{first_chunk(params.offsets, expert, kRows)} * params.width +
                         columns.begin + column;
  float total = 0;
#pragma unroll 8
  for (int32_t chunk = 0; chunk < chunks; ++chunk) total += partial[int64_t{chunk} * params.width];
  Out& out =
      static_cast<Out*>(columns.data)[expert * columns.stride + int64_t{column} * columns.step];
  store(accumulate ? to_float(out) + total : total, out);
}

void sum_columns(const ChunkSums& sums, int64_t capacity, tilemoe_dtype dtype,
                 cudaStream_t stream) {
  constexpr int kColumns = kThreads * kVector;
  const dim3 grid(static_cast<unsigned>(max_chunks(capacity, sums.E, kRows)),
                  static_cast<unsigned>((sums.width + kColumns - 1) / kColumns));
  launch_kernel("sums of bias gradients", {.blocks = grid, .threads = kThreads, .stream = stream},
                with_element(dtype, [&]<class Element>() { return &sum_chunks<Element>; }), sums);
}

void write_bias(const ChunkSums& sums, const BiasColumns& columns, bool accumulate,
                cudaStream_t stream) {
  const int64_t blocks = int64_t{sums.E} * ((columns.count + kThreads - 1) / kThreads);
  TILEMOE_ASSERT(blocks <= INT32_MAX, "bias gradients of " << sums.E << " experts");
  const auto kernel = with_float(columns.dtype, [&]<class Out>() { return &add_chunks<Out>; });
  launch_kernel("bias gradients",
                {.blocks = static_cast<unsigned>(blocks), .threads = kThreads, .stream = stream},
                kernel, sums, columns, accumulate);
}

int64_t width_of_H(const tilemoe_experts& experts) {
  return tilemoe_activation_gated(experts.activation) != 0 ? 2 * experts.n : experts.n;
}

// The columns of H from `begin` on that make `bias`, whose first is element `offset` of it.
BiasColumns bias_columns(const tilemoe_tensor& bias, int64_t offset, int64_t begin, int64_t count,
                         int32_t step) {
  return {.dtype = bias.dtype,
          .data = static_cast<char*>(bias.data) +
                  offset * static_cast<int64_t>(tilemoe_dtype_size(bias.dtype)),
          .stride = bias.stride[0],
          .begin = static_cast<int32_t>(begin),
          .count = static_cast<int32_t>(count),
          .step = step};
}

// dH has gate columns, then up columns, unless it has them as W1, which b1 always does.
void write_b1(const BiasGradient& step, const ChunkSums& sums, cudaStream_t stream) {
  const int64_t n = step.experts->n;
  const auto write = [&](const BiasColumns& columns) {
    write_bias(sums, columns, step.accumulate, stream);
  };
  if (has_interleaved_columns(*step.experts, step.W1))
    return write(bias_columns(step.db1, 0, 0, sums.width, 1));
  switch (step.experts->gate_layout) {
    case TILEMOE_GATE_SPLIT:
      if (present(step.db1)) write(bias_columns(step.db1, 0, 0, n, 1));
      if (present(step.db1_up)) write(bias_columns(step.db1_up, 0, n, n, 1));
      return;
    case TILEMOE_GATE_INTERLEAVED:
      write(bias_columns(step.db1, 0, 0, n, 2));
      write(bias_columns(step.db1, 1, n, n, 2));
      return;
    case TILEMOE_GATE_CONCATENATED: write(bias_columns(step.db1, 0, 0, sums.width, 1)); return;
  }
}

}  // namespace

size_t bias_gradient_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int64_t width = std::max(experts.d, width_of_H(experts));
  return static_cast<size_t>(max_chunks(sizes.capacity, experts.E, kRows) * width) * sizeof(float);
}

void bias_gradient(const BiasGradient& step) {
  constexpr int64_t kElementBytes = 2;
  const tilemoe_experts& experts = *step.experts;
  const Rows& rows = step.rows;
  const auto stream = static_cast<cudaStream_t>(step.stream);
  ChunkSums sums{.offsets = rows.offsets,
                 .E = static_cast<int32_t>(rows.E),
                 .partial = static_cast<float*>(step.scratch.data)};
  if (present(step.db2)) {
    sums.token = rows.token;
    sums.score = rows.score;
    sums.rows = static_cast<const char*>(step.dO.data);
    sums.row_bytes = step.dO.stride[0] * kElementBytes;
    sums.width = static_cast<int32_t>(experts.d);
    sum_columns(sums, rows.capacity, experts.dtype, stream);
    write_bias(sums, bias_columns(step.db2, 0, 0, experts.d, 1), step.accumulate, stream);
  }
  if (!present(step.dH)) return;
  sums.token = nullptr;
  sums.score = nullptr;
  sums.rows = static_cast<const char*>(step.dH.data);
  sums.row_bytes = step.dH.stride[0] * kElementBytes;
  sums.width = static_cast<int32_t>(width_of_H(experts));
  sum_columns(sums, rows.capacity, experts.dtype, stream);
  write_b1(step, sums, stream);
}

}  // namespace tilemoe::cuda
