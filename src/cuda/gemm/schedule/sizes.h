// What the choice of a tile knows of a step: the rows' number, the experts and the widths alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/backend.h"
#include "cuda/gemm/schedule/cost.h"

namespace tilemoe::cuda {

ProjectionSize size_of(const UpProjection& step);
ProjectionSize size_of(const DownProjection& step);
ProjectionSize size_of(const InputGradient& step);
ProjectionSize size_of(const ActivationGradient& step);

// Into how many shares the weight gradients cut the work on long experts, and what scratch that
// takes. One function tells the kernel and the memory plan.

// A product of `parts` dense parts of so many columns with d gathered ones.
struct WeightGradientSize {
  int64_t dense_columns;  // of a part
  int parts;
  int64_t d;
  int64_t capacity;      // rows, of all experts
  int64_t of_an_expert;  // rows that one may have; past capacity: any
};

// Those that a step's sums over long experts are shared out to; none asked for: one for each two
// SMs.
int32_t workers_of(int32_t requested, int sms);

// Shares at most; 0: no expert counts as long. Experts that have more rows than they may, of ids
// that repeat within a token, are then not cut: slower, and right.
int32_t weight_gradient_splits(const WeightGradientSize& size, int32_t workers);

// Shares of the step, for whatever of its outputs may be asked for: their most.
int32_t weight_gradient_splits(Step step, const tilemoe_experts& experts, const ScratchSizes& sizes,
                               int sms);

}  // namespace tilemoe::cuda
