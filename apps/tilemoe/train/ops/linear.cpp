#include <dnnl.h>

#include <stdexcept>

#include "train/ops/cpu_operators.h"
#include "train/ops/partial_sums.h"

namespace tilemoe::train {
namespace {

// Rows of a batch that one task multiplies.
constexpr int64_t kRowsPerGemm = 512;

// C (m, n) = A B + beta C, row-major; 'T' if a matrix is stored transposed.
void multiply(char a_form, char b_form, int64_t m, int64_t n, int64_t k, const float* a,
              int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  if (dnnl_sgemm(a_form, b_form, m, n, k, 1.f, a, lda, b, ldb, beta, c, ldc) != dnnl_success)
    throw std::runtime_error("a GEMM of oneDNN failed");
}

float beta_of(Write write) {
  return write == Write::kAdd ? 1.f : 0.f;
}

// body(first row, rows, task)
template <class Body>
void for_gemms(int64_t rows, Body&& body) {
  parallel_for(ceil_div(rows, kRowsPerGemm), [&](int64_t task, int) {
    const int64_t first = task * kRowsPerGemm;
    body(first, std::min(kRowsPerGemm, rows - first), task);
  });
}

}  // namespace

void CpuOperators::linear(const LinearShape& shape, ConstFloats x, ConstFloats weight, Floats y,
                          Write write) {
  for_gemms(shape.rows, [&](int64_t first, int64_t rows, int64_t) {
    multiply('N', 'T', rows, shape.out, shape.in, x.data() + first * shape.in, shape.in,
             weight.data(), shape.in, beta_of(write), y.data() + first * shape.out, shape.out);
  });
}

void CpuOperators::linear_backward_input(const LinearShape& shape, ConstFloats dy,
                                         ConstFloats weight, Floats dx, Write write) {
  for_gemms(shape.rows, [&](int64_t first, int64_t rows, int64_t) {
    multiply('N', 'N', rows, shape.in, shape.out, dy.data() + first * shape.out, shape.out,
             weight.data(), shape.in, beta_of(write), dx.data() + first * shape.in, shape.in);
  });
}

int64_t linear_backward_weight_scratch(const LinearShape& shape) {
  return ceil_div(shape.rows, kRowsPerGemm) * shape.in * shape.out;
}

void CpuOperators::linear_backward_weight(const LinearShape& shape, ConstFloats dy, ConstFloats x,
                                          Floats dweight, Floats scratch) {
  for_gemms(shape.rows, [&](int64_t first, int64_t rows, int64_t task) {
    multiply('T', 'N', shape.out, shape.in, rows, dy.data() + first * shape.out, shape.out,
             x.data() + first * shape.in, shape.in, 0.f,
             scratch.data() + task * shape.out * shape.in, shape.in);
  });
  sum_partials(scratch, ceil_div(shape.rows, kRowsPerGemm), dweight);
}

void CpuOperators::add_bias(ConstFloats bias, Floats y) {
  const auto width = std::ssize(bias);
  for_row_blocks(std::ssize(y) / width, [&](int64_t first, int64_t last, int64_t) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t c = 0; c < width; ++c) y.data()[t * width + c] += bias.data()[c];
  });
}

int64_t bias_gradient_scratch(int64_t rows, int64_t out) {
  return row_tasks(rows) * out;
}

void CpuOperators::bias_gradient(ConstFloats dy, Floats dbias, Floats scratch) {
  const auto width = std::ssize(dbias);
  const int64_t rows = std::ssize(dy) / width;
  for_row_blocks(rows, [&](int64_t first, int64_t last, int64_t task) {
    float* const partial = scratch.data() + task * width;
    std::fill_n(partial, width, 0.f);
    for (int64_t t = first; t < last; ++t)
      for (int64_t c = 0; c < width; ++c) partial[c] += dy.data()[t * width + c];
  });
  sum_partials(scratch, row_tasks(rows), dbias);
}

}  // namespace tilemoe::train
