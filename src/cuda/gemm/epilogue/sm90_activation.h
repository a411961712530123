// Epilogues of the up-projection: H = D + bias, stored if the caller requests it, and A = act(H)
// from the float32 accumulators, so that inference and training give equal bits. Three epilogues:
// plain SwiGLU with deferred stores, any activation, and interleaved gate/up columns.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/epilogue/activation.h"
#include "cuda/gemm/epilogue/activations.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm90 {

// Plain SwiGLU: A = silu(gate) up. A tile's columns are two parts: gate, then up of the same
// columns of A. The gate is stored at once, while A is computed; the stores of up and A are
// deferred: they overlap with the MMAs of the next tile.
template <class Shape, FragmentStore Rows>
class SwiGLUEpilogue {
 public:
  static_assert(all_same<typename Rows::Element, typename Shape::Recipe::Out::H,
                         typename Shape::Recipe::Out::A>);
  static constexpr int kParts = 2;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of A
  static constexpr int kSharedBytes = Rows::kSharedBytes;
  static_assert(Shape::kFragments == 1 && Rows::kBatchColumns == kColumns, "a part is a batch");

  struct Params {
    typename Rows::Output H;  // (capacity, 2, n); optional
    typename Rows::Output A;  // (capacity, 1, n)
    Bias bias[kParts];
  };

  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return {.H = Rows::output(H, kParts, experts.n),
            .A = Rows::output(A, 1, experts.n),
            .bias = {bias_of(biases.part[0]), bias_of(biases.part[1])}};
  }

  __device__ SwiGLUEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  static constexpr int kBatches = 2;  // up, A

  __device__ __forceinline__ void defer(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    row_ = row;
    row_end_ = tile.row_end;
    column_ = tile.n_block * kColumns;
    if (row_ >= row_end_) return;
    add_bias<typename Shape::Element, 0, kColumns>(params_.bias[0], tile.expert, column_, D);
    add_bias<typename Shape::Element, kUp, kColumns>(params_.bias[1], tile.expert, column_, D);
    rows_.store(params_.H, 0, row_, row_end_, 0, column_,
                [&](int j, int i) { return D[0][4 * j + i]; });
#pragma unroll
    for (int j = 0; j < kLate; ++j) {
      float* const gate = &D[0][4 * j];
      round(up_, j, gate + kUp);
      activate(gate, gate + kUp);
      round(A_, j, gate);
    }
#pragma unroll
    for (int i = 0; i < kLateNumbers; ++i) {
      ptx::pin(late_gate_[i] = D[0][4 * kLate + i]);
      ptx::pin(late_up_[i] = D[0][kUp + 4 * kLate + i]);
    }
  }

  __device__ __forceinline__ void store_deferred(int32_t batch) {
    if (row_ >= row_end_) return;
    if (batch == 0) {
#pragma unroll
      for (int i = 0; i < kLateNumbers; i += 4) round(up_, kLate + i / 4, &late_up_[i]);
      rows_.store_packed(params_.H, 0, row_, row_end_, 1, column_, up_);
    } else if (batch == 1) {
#pragma unroll
      for (int i = 0; i < kLateNumbers; i += 4) {
        activate(&late_gate_[i], &late_up_[i]);
        round(A_, kLate + i / 4, &late_gate_[i]);
      }
      rows_.store_packed(params_.A, 0, row_, row_end_, 0, column_, A_);
    }
  }

  __device__ void finish() const {
    rows_.finish();
  }

 private:
  static constexpr int kSlices = kColumns / 8;
  static constexpr int kUp = kColumns / 2;  // the first accumulator of the up part
  // The accumulators of the last slices are kept in float32 and activated during the next tile's
  // MMAs, too: as many as fit in registers.
  static constexpr int kLate = kSlices - 4;  // the first of these slices
  static constexpr int kLateNumbers = 4 * (kSlices - kLate);

  // A part in 16 bits; [j][half] holds numbers 4 j + 2 half and 4 j + 2 half + 1.
  using Part = uint32_t[kSlices][2];

  // Rounds four numbers to slice j of `part`.
  __device__ __forceinline__ static void round(Part& part, int j, const float* numbers) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::pin(part[j][half] =
                   pack(numbers[2 * half], numbers[2 * half + 1], typename Rows::Element()));
  }

  // Four numbers of A replace the gate.
  __device__ __forceinline__ static void activate(float* gate, const float* up) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) activation::SwiGLU().two(gate[i], gate[i + 1], up[i], up[i + 1]);
  }

  const Params& params_;
  Rows rows_;
  Part up_, A_;  // all slices except the last
  float late_gate_[kLateNumbers], late_up_[kLateNumbers];
  int32_t row_ = 0, row_end_ = 0, column_;  // of the deferred tile; no rows: none
};

// Any activation. A tile's columns are kParts parts of equal width: gate, then up of the same
// columns of A.
template <class Shape, Activations kActivations, FragmentStore Rows>
class ActivationEpilogue {
 public:
  static_assert(all_same<typename Rows::Element, typename Shape::Recipe::Out::H,
                         typename Shape::Recipe::Out::A>);
  static constexpr int kParts = kActivations == Activations::kPlain ? 1 : 2;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of A
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    typename Rows::Output H;  // (capacity, kParts, n); optional
    typename Rows::Output A;  // (capacity, 1, n)
    Bias bias[kParts];
    ActivationParams activation;
  };

  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    Params params{.H = Rows::output(H, biases.count, biases.columns),
                  .A = Rows::output(A, 1, experts.n),
                  .bias = {},
                  .activation = activation_params(experts)};
    for (int p = 0; p < kParts; ++p) params.bias[p] = bias_of(biases.part[p]);
    return params;
  }

  __device__ ActivationEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    using Element = typename Shape::Element;
    if (row >= tile.row_end) return;
    const int32_t column = tile.n_block * kColumns;
    add_bias<Element, 0, kColumns>(params_.bias[0], tile.expert, column, D);
    if constexpr (kParts == 2)
      add_bias<Element, kUp, kColumns>(params_.bias[1], tile.expert, column, D);
    store_part<0>(params_.H, 0, row, tile.row_end, column, D);
    if constexpr (kParts == 2) store_part<kUp>(params_.H, 1, row, tile.row_end, column, D);
    activate<kActivations>(params_.activation, D);
    store_part<0>(params_.A, 0, row, tile.row_end, column, D);
  }

  __device__ void finish() const { rows_.finish(); }

 private:
  static constexpr int kUp = kColumns / 2;  // the first accumulator of the up part

  // Stores the part that begins at accumulator kFirst.
  template <int kFirst>
  __device__ __forceinline__ void store_part(const typename Rows::Output& out, int32_t part,
                                             int32_t row, int32_t row_end, int32_t column,
                                             const Accumulators<Shape>& D) const {
    store_columns<Shape, kColumns>(rows_, out, row, row_end, part, column,
                                   [&](int m, int i) { return D[m][kFirst + i]; });
  }

  const Params& params_;
  Rows rows_;
};

// Interleaved gate/up columns in W1 and H: A = act(H) from two neighbouring accumulators of one
// thread.
template <class Shape, Activations kActivations, FragmentStore Rows>
class InterleavedActivationEpilogue {
 public:
  static_assert(all_same<typename Rows::Element, typename Shape::Recipe::Out::H,
                         typename Shape::Recipe::Out::A>);
  static constexpr int kParts = 1;                       // of the tile's columns
  static constexpr int kColumns = Shape::BLOCK_N;        // of H
  static constexpr int kActivated = Shape::BLOCK_N / 2;  // of A
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    typename Rows::Output H;  // (capacity, 1, 2n); optional
    typename Rows::Output A;  // (capacity, 1, n)
    Bias bias[1];             // (E, 2n)
    ActivationParams activation;
  };

  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return {.H = Rows::output(H, 1, biases.columns),
            .A = Rows::output(A, 1, experts.n),
            .bias = {bias_of(biases.part[0])},
            .activation = activation_params(experts)};
  }

  __device__ InterleavedActivationEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    if (row >= tile.row_end) return;
    const int32_t first = tile.n_block * kColumns;
    const auto number = [&](int m, int i) { return D[m][i]; };
    add_bias<typename Shape::Element, 0, kColumns>(params_.bias[0], tile.expert, first, D);
    store_columns<Shape, kColumns>(rows_, params_.H, row, tile.row_end, 0, first, number);
    activate_interleaved<kActivations>(params_.activation, D);
    store_columns<Shape, kActivated>(rows_, params_.A, row, tile.row_end, 0, first / 2, number);
  }

  __device__ void finish() const { rows_.finish(); }

 private:
  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda::sm90
