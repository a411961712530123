// The sizes of a step that the choice of its tile and its split-K depend on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/gemm/schedule/cost.h"

namespace tilemoe::cuda {

ProjectionSize size_of(const UpProjection& step);
ProjectionSize size_of(const DownProjection& step);
ProjectionSize size_of(const InputGradient& step);
ProjectionSize size_of(const ActivationGradient& step);

// ---- the number of splits of long experts in the weight gradients, and their scratch. The kernel
// and the memory plan call the same function.

// A GEMM of `parts` dense parts of `dense_columns` columns with d gathered columns.
struct WeightGradientSize {
  int64_t dense_columns;  // of a part
  int parts;
  int64_t d;
  int64_t capacity;      // rows, of all experts
  int64_t of_an_expert;  // maximum rows of one; past capacity: any
};

// The workers that the split-K of long experts is made for; 0 requested: one for each two SMs.
int32_t workers_of(int32_t requested, int sms);

// The maximum number of splits; 0: no expert counts as long. Experts with more rows than the
// maximum, from ids that repeat within a token, are then not split: slower, but correct.
int32_t weight_gradient_splits(const WeightGradientSize& size, int32_t workers);

// Splits of the steps weight_gradient_1 and weight_gradient_2: the maximum over the outputs that may
// be wanted.
int32_t weight_gradient_1_splits(const tilemoe_experts& experts, const ScratchSizes& sizes,
                                 int sms);
int32_t weight_gradient_2_splits(const tilemoe_experts& experts, const ScratchSizes& sizes,
                                 int sms);
// The maximum rank of a step lora_gradient; 0: no adapters. rank_1 may be the sum of two ranks.
inline int64_t max_rank(const tilemoe_experts& experts) {
  return std::min(std::max(experts.rank_1, experts.rank_2), TILEMOE_MAX_RANK);
}
// Splits of the step lora_gradient: the maximum over the gradients of both factors of both adapters
// of any rank up to the experts'.
int32_t lora_gradient_splits(const tilemoe_experts& experts, const ScratchSizes& sizes, int sms);

}  // namespace tilemoe::cuda
