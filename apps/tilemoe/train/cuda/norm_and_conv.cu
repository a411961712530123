// Normalisation of rows, and the short convolution along them.
#include "train/cuda/kernels.h"
#include "train/cuda/launch.h"

namespace tilemoe::train::cuda {
namespace {

// A warp a row.
__global__ void normalize_rows(const float* x, const float* gain, float* y, float* inverse_rms,
                               int64_t rows, int64_t width) {
  constexpr float kEpsilon = 1e-6f;
  const int64_t row = global_warp();
  if (row >= rows) return;
  const float* const from = x + row * width;
  float sum = 0;
  for (int64_t c = lane(); c < width; c += kWarp) sum += from[c] * from[c];
  const float r = 1.f / sqrtf(warp_sum(sum) / static_cast<float>(width) + kEpsilon);
  for (int64_t c = lane(); c < width; c += kWarp) y[row * width + c] = from[c] * r * gain[c];
  if (lane() == 0) inverse_rms[row] = r;
}

// With r = 1 / rms and g = gain * dy: dx += r g - x r^3 mean(g x).
__global__ void normalize_rows_backward(const float* x, const float* gain, const float* inverse_rms,
                                        const float* dy, float* dx, int64_t rows, int64_t width) {
  const int64_t row = global_warp();
  if (row >= rows) return;
  const float* const from = x + row * width;
  const float* const gradient = dy + row * width;
  float sum = 0;
  for (int64_t c = lane(); c < width; c += kWarp) sum += gain[c] * gradient[c] * from[c];
  const float r = inverse_rms[row];
  const float x_factor = -warp_sum(sum) / static_cast<float>(width) * r * r * r;
  for (int64_t c = lane(); c < width; c += kWarp)
    dx[row * width + c] += x_factor * from[c] + r * (gain[c] * gradient[c]);
}

// A thread a column of a part of the rows: sums of dy x r.
__global__ void sum_gain_gradients(const float* x, const float* inverse_rms, const float* dy,
                                   float* partials, int64_t rows, int64_t width) {
  const int64_t column = global_thread(), part = blockIdx.y;
  if (column >= width) return;
  const int64_t first = part * kRowsPerPart, last = min(rows, first + kRowsPerPart);
  float sum = 0;
  for (int64_t row = first; row < last; ++row)
    sum += dy[row * width + column] * x[row * width + column] * inverse_rms[row];
  partials[part * width + column] = sum;
}

__global__ void filter_tokens(const float* x, const float* filter, int64_t taps, int64_t length,
                              const float* addend, float* y, int64_t count, int64_t width) {
  const int64_t i = global_thread();
  if (i >= count) return;
  const int64_t token = i / width, column = i % width;
  const int64_t reach = min(taps, token % length + 1);
  float sum = addend[i];
  for (int64_t j = 0; j < reach; ++j) sum += filter[j * width + column] * x[i - j * width];
  y[i] = sum;
}

// dx(t) += sum over j of w_j dy(t + j)
__global__ void filter_tokens_backward(const float* filter, int64_t taps, int64_t length,
                                       const float* dy, float* dx, int64_t count, int64_t width) {
  const int64_t i = global_thread();
  if (i >= count) return;
  const int64_t token = i / width, column = i % width;
  const int64_t reach = min(taps, length - token % length);
  float sum = dx[i];
  for (int64_t j = 0; j < reach; ++j) sum += filter[j * width + column] * dy[i + j * width];
  dx[i] = sum;
}

// A thread a tap and column of a part of the rows: sums of dy(t + j) x(t).
__global__ void sum_filter_gradients(const float* x, const float* dy, int64_t taps, int64_t length,
                                     float* partials, int64_t rows, int64_t width) {
  const int64_t i = global_thread(), part = blockIdx.y;
  if (i >= taps * width) return;
  const int64_t j = i / width, column = i % width;
  const int64_t first = part * kRowsPerPart, last = min(rows, first + kRowsPerPart);
  float sum = 0;
  for (int64_t row = first; row < last; ++row)
    if (j < length - row % length) sum += dy[(row + j) * width + column] * x[row * width + column];
  partials[part * taps * width + i] = sum;
}

}  // namespace

void rms_norm(const float* x, const float* gain, float* y, float* inverse_rms, int64_t rows,
              int64_t width) {
  normalize_rows<<<blocks_for(rows, kWarps), kThreads>>>(x, gain, y, inverse_rms, rows, width);
  check_launch("normalize_rows");
}

void rms_norm_backward(const float* x, const float* gain, const float* inverse_rms, const float* dy,
                       float* dx, float* dgain, float* scratch, int64_t rows, int64_t width) {
  normalize_rows_backward<<<blocks_for(rows, kWarps), kThreads>>>(x, gain, inverse_rms, dy, dx,
                                                                  rows, width);
  check_launch("normalize_rows_backward");
  const unsigned parts = blocks_for(rows, kRowsPerPart);
  sum_gain_gradients<<<dim3(blocks_for(width, kThreads), parts), kThreads>>>(x, inverse_rms, dy,
                                                                             scratch, rows, width);
  check_launch("sum_gain_gradients");
  sum_partials(scratch, parts, dgain, width);
}

void causal_conv(Sequences sequences, const float* x, const float* filter, int64_t taps,
                 const float* addend, float* y, int64_t width) {
  const int64_t count = sequences.tokens() * width;
  filter_tokens<<<blocks_for(count, kThreads), kThreads>>>(x, filter, taps, sequences.length,
                                                           addend, y, count, width);
  check_launch("filter_tokens");
}

void causal_conv_backward(Sequences sequences, const float* x, const float* filter, int64_t taps,
                          const float* dy, float* dx, float* dfilter, float* scratch,
                          int64_t width) {
  const int64_t rows = sequences.tokens(), count = rows * width;
  filter_tokens_backward<<<blocks_for(count, kThreads), kThreads>>>(filter, taps, sequences.length,
                                                                    dy, dx, count, width);
  check_launch("filter_tokens_backward");
  const unsigned parts = blocks_for(rows, kRowsPerPart);
  sum_filter_gradients<<<dim3(blocks_for(taps * width, kThreads), parts), kThreads>>>(
      x, dy, taps, sequences.length, scratch, rows, width);
  check_launch("sum_filter_gradients");
  sum_partials(scratch, parts, dfilter, taps * width);
}

}  // namespace tilemoe::train::cuda
