// AdamW, and the norm of all gradients that it clips to.
#include "train/cuda/kernels.h"
#include "train/cuda/launch.h"

namespace tilemoe::train::cuda {
namespace {

constexpr int64_t kPart = 32 * kThreads;  // elements of a CTA

__global__ void __launch_bounds__(kThreads)
    sum_squares(const float* values, int64_t count, double* sums) {
  __shared__ double parts[kThreads];
  const int64_t first = blockIdx.x * kPart, last = min(count, first + kPart);
  double sum = 0;
  for (int64_t i = first + threadIdx.x; i < last; i += kThreads)
    sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  parts[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

__global__ void update_elements(AdamWStretch stretch, AdamWFactors factors) {
  const int64_t i = global_thread();
  if (i >= stretch.size) return;
  const float g = stretch.gradient[i] * factors.gradient_scale;
  const float mean = factors.beta1 * stretch.mean[i] + (1 - factors.beta1) * g;
  const float square = factors.beta2 * stretch.square[i] + (1 - factors.beta2) * (g * g);
  stretch.mean[i] = mean, stretch.square[i] = square;
  const float deviation = sqrtf(square * factors.square_scale) + factors.epsilon;
  stretch.value[i] = factors.kept * stretch.value[i] - factors.step_size * mean / deviation;
}

}  // namespace

int64_t square_parts(int64_t count) {
  return (count + kPart - 1) / kPart;
}

void sum_of_squares(const float* values, int64_t count, double* sums) {
  sum_squares<<<blocks_for(count, kPart), kThreads>>>(values, count, sums);
  check_launch("sum_squares");
}

void adamw_update(const AdamWStretch& stretch, const AdamWFactors& factors) {
  update_elements<<<blocks_for(stretch.size, kThreads), kThreads>>>(stretch, factors);
  check_launch("update_elements");
}

}  // namespace tilemoe::train::cuda
