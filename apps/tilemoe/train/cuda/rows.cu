// Elementwise kernels, biases, and sums over rows.
#include <cuda_bf16.h>

#include "train/cuda/kernels.h"
#include "train/cuda/launch.h"

namespace tilemoe::train::cuda {
namespace {

__global__ void round_elements(const float* from, __nv_bfloat16* to, int64_t count) {
  const int64_t i = global_thread();
  if (i < count) to[i] = __float2bfloat16_rn(from[i]);
}

__global__ void widen_elements(const __nv_bfloat16* from, const float* addend, float* to,
                               int64_t count) {
  const int64_t i = global_thread();
  if (i < count) to[i] = __bfloat162float(from[i]) + (addend ? addend[i] : 0.f);
}

__global__ void add_to_rows(const float* bias, float* y, int64_t count, int64_t width) {
  const int64_t i = global_thread();
  if (i < count) y[i] += bias[i % width];
}

// A thread a column of a part of the rows.
__global__ void sum_rows(const float* dy, float* partials, int64_t rows, int64_t width) {
  const int64_t column = global_thread(), part = blockIdx.y;
  if (column >= width) return;
  const int64_t first = part * kRowsPerPart, last = min(rows, first + kRowsPerPart);
  float sum = 0;
  for (int64_t row = first; row < last; ++row) sum += dy[row * width + column];
  partials[part * width + column] = sum;
}

__global__ void sum_parts(const float* partials, int64_t parts, float* out, int64_t width) {
  const int64_t i = global_thread();
  if (i >= width) return;
  float sum = 0;
  for (int64_t part = 0; part < parts; ++part) sum += partials[part * width + i];
  out[i] = sum;
}

}  // namespace

void round_to_bfloat16(const float* from, uint16_t* to, int64_t count) {
  round_elements<<<blocks_for(count, kThreads), kThreads>>>(
      from, reinterpret_cast<__nv_bfloat16*>(to), count);
  check_launch("round_elements");
}

void widen_bfloat16(const uint16_t* from, const float* addend, float* to, int64_t count) {
  widen_elements<<<blocks_for(count, kThreads), kThreads>>>(
      reinterpret_cast<const __nv_bfloat16*>(from), addend, to, count);
  check_launch("widen_elements");
}

void add_bias(const float* bias, float* y, int64_t rows, int64_t width) {
  const int64_t count = rows * width;
  add_to_rows<<<blocks_for(count, kThreads), kThreads>>>(bias, y, count, width);
  check_launch("add_to_rows");
}

void bias_gradient(const float* dy, float* dbias, float* scratch, int64_t rows, int64_t width) {
  const unsigned parts = blocks_for(rows, kRowsPerPart);
  sum_rows<<<dim3(blocks_for(width, kThreads), parts), kThreads>>>(dy, scratch, rows, width);
  check_launch("sum_rows");
  sum_partials(scratch, parts, dbias, width);
}

void sum_partials(const float* partials, int64_t parts, float* out, int64_t width) {
  sum_parts<<<blocks_for(width, kThreads), kThreads>>>(partials, parts, out, width);
  check_launch("sum_parts");
}

}  // namespace tilemoe::train::cuda
