
#include "cuda/gemm/schedule/sizes.h"

#include <algorithm>

#include "cuda/gemm/schedule/splits.h"

namespace tilemoe::cuda {

ProjectionSize size_of(const UpProjection& step) {
  return {.rows = step.rows.capacity,
          .E = step.rows.E,
          .columns = (tilemoe_activation_gated(step.experts->activation) ? 2 : 1) * step.experts->n,
          .sum = step.experts->d,
          .epilogue_a_column = 8,
          .gathers = step.rows.token != nullptr};
}

ProjectionSize size_of(const DownProjection& step) {
  return {.rows = step.rows.capacity,
          .E = step.rows.E,
          .columns = step.Y.shape[1],
          .sum = step.experts->n,
          .epilogue_a_column = 4};
}

ProjectionSize size_of(const InputGradient& step) {
  return {.rows = step.rows.capacity,
          .E = step.rows.E,
          .columns = step.dX_rows.shape[1],
          .sum = step.dH.shape[1],
          .epilogue_a_column = 4};
}

ProjectionSize size_of(const ActivationGradient& step) {
  return {.rows = step.rows.capacity,
          .E = step.rows.E,
          .columns = step.experts->n,
          .sum = step.experts->d,
          .epilogue_a_column = 44,
          .gathers = true};
}

int32_t workers_of(int32_t asked_for, int multiprocessors) {
  return asked_for > 0 ? asked_for : std::max(1, multiprocessors / 2);
}

int32_t weight_gradient_shares(const WeightGradientSize& size, int32_t workers) {
  const auto reference = ReferenceTiles::of(size.d, size.dense_columns, size.parts);
  return shares_at_most(reference.count(), size.capacity,
                        std::min(size.of_an_expert, size.capacity), workers);
}

int32_t weight_gradient_shares(Step step, const tilemoe_experts& experts, const ScratchSizes& sizes,
                               int multiprocessors) {
  const auto shares = [&](int64_t dense_columns, int parts) {
    return weight_gradient_shares({.dense_columns = dense_columns,
                                   .parts = parts,
                                   .d = experts.d,
                                   .capacity = sizes.capacity,
                                   .of_an_expert = sizes.rows_of_an_expert},
                                  workers_of(sizes.workers, multiprocessors));
  };
  const int64_t n = experts.n;
  if (step == Step::kWeightGradient2 || !tilemoe_activation_gated(experts.activation))
    return shares(n, 1);
  switch (experts.gate_layout) {
    case TILEMOE_GATE_CONCATENATED: return shares(n, 2);
    // Two parts, or one where gate and up lie in adjacent columns: the weight's strides tell.
    case TILEMOE_GATE_INTERLEAVED: return std::max(shares(n, 2), shares(2 * n, 1));
    case TILEMOE_GATE_SPLIT: break;
  }
  // Of two that may be asked for one alone may be.
  return sizes.dW1 && sizes.dW1_up ? std::max(shares(n, 2), shares(n, 1)) : shares(n, 1);
}

}  // namespace tilemoe::cuda
