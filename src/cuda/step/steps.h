// The steps that have kernels, as the backend calls them.
#pragma once

#include "backend.h"

namespace tilemoe::cuda {

template <class Element>
void up_projection(const UpProjection& step);
// bfloat16, plain SwiGLU, W1 contiguous along d: has tiles of its own.
void up_projection_swiglu(const UpProjection& step);

template <class Element>
void down_projection(const DownProjection& step);

void combine(const Combine& step);

template <class Element>
void activation_gradient(const ActivationGradient& step);
template <class Element, int kColumns>  // of the tile: 192 or 256
void activation_gradient(const ActivationGradient& step);
// bfloat16, plain SwiGLU, W2 contiguous along n.
void activation_gradient_swiglu(const ActivationGradient& step);

template <class Element>
void input_gradient(const InputGradient& step);

// What the weight gradients have in common: per expert and part, out = [out +] the sum over the
// expert's rows of dense^T gathered. The parts' outputs have one dtype and one major.
struct WeightGradientProduct {
  Rows rows;
  tilemoe_tensor dense;     // (capacity, columns)
  int64_t dense_columns;    // of a part
  tilemoe_tensor gathered;  // (T, d)
  struct Part {
    tilemoe_tensor out;   // (E, dense_columns, d)
    int64_t dense_first;  // column of `dense`
  } part[2];
  int parts;
  bool accumulate;
  Scratch scratch;
  void* stream;
  int block_turns = 1;
  int32_t workers = 0;
};
template <class Element, int kColumns>  // of the tile: 192 or 256
void weight_gradient(const WeightGradientProduct& product);
void weight_gradient_2(const WeightGradient2& step);
void weight_gradient_1(const WeightGradient1& step);
size_t weight_gradient_scratch_bytes(Step step, const tilemoe_experts& experts,
                                     const ScratchSizes& sizes);
// Of long experts, at most: those of cuda/schedule/weight_gradient_shares.h.
int32_t weight_gradient_shares(const WeightGradientProduct& product);

void score_gradient(const ScoreGradient& step);
void bias_gradient(const BiasGradient& step);
size_t bias_gradient_scratch_bytes(const tilemoe_experts& experts, int64_t capacity);

}  // namespace tilemoe::cuda
