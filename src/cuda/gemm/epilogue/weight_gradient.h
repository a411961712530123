// Stores fragments to a weight gradient in memory, in either major and any type: adds to the
// gradient or overwrites it.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/variant.h"

namespace tilemoe::cuda {

// One gradient, (E, rows, columns). D's columns are in one or two gradients.
template <class Out>
struct Gradient {
  Out* data;
  int64_t expert_stride, stride;  // `stride`: of D's dimension that is not contiguous
};

// The position of a consumer's rows of a tile in the gradient.
struct GradientPlace {
  int32_t part, expert, row, column;
};

struct GradientSize {
  int32_t rows, columns;
};

// Calls visit(place, numbers) for each run of the lane's numbers that is inside the gradient and
// contiguous in memory: two numbers if the gradient is row-major, else one.
template <class Shape, OutputMajor kMajor, class Out, int kFragments, int kNumbers, class Visit>
__device__ __forceinline__ void for_each_run(const Gradient<Out>& to, const GradientSize& size,
                                             const GradientPlace& first,
                                             float (&D)[kFragments][kNumbers], const Visit& visit) {
  constexpr bool kTransposed = kMajor == OutputMajor::kColumn;
  constexpr int kRun = kTransposed ? 1 : 2;
  Out* const expert = to.data + first.expert * to.expert_stride;
  const int64_t stride = to.stride;
  const int32_t column = first.column + fragment::column();
#pragma unroll
  for (int m = 0; m < kFragments; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first.row + Shape::fragment_row(m) + fragment::row(half);
      if (row >= size.rows) continue;
      Out* place = expert + (kTransposed ? column * stride + row : row * stride + column);
#pragma unroll
      for (int j = 0; j < kNumbers / 4; ++j) {
        if (column + 8 * j >= size.columns) break;
#pragma unroll
        for (int i = 0; i < 2; i += kRun)
          visit(place + (kTransposed ? (8 * j + i) * stride : 8 * j + i),
                &D[m][4 * j + 2 * half + i]);
      }
    }
}

// Adds the gradient in memory to the fragments, in float32.
template <class Shape, OutputMajor kMajor, class Out, int kFragments, int kNumbers>
__device__ __forceinline__ void add_gradient(const Gradient<Out>& from, const GradientSize& size,
                                             const GradientPlace& first,
                                             float (&D)[kFragments][kNumbers]) {
  for_each_run<Shape, kMajor>(from, size, first, D, [](const Out* old, float* number) {
#pragma unroll
    for (int i = 0; i < (kMajor == OutputMajor::kColumn ? 1 : 2); ++i)
      number[i] += static_cast<float>(old[i]);
  });
}

// Writes fragments to a float32 gradient.
template <class Shape, OutputMajor kMajor, int kFragments, int kNumbers>
__device__ __forceinline__ void write_gradient(const Gradient<float>& to, const GradientSize& size,
                                               const GradientPlace& first,
                                               float (&D)[kFragments][kNumbers]) {
  for_each_run<Shape, kMajor>(to, size, first, D, [](float* place, const float* number) {
    if constexpr (kMajor == OutputMajor::kRow)
      *reinterpret_cast<float2*>(place) = {number[0], number[1]};
    else
      *place = number[0];
  });
}

}  // namespace tilemoe::cuda
