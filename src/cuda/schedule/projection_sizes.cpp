#include "cuda/schedule/projection_sizes.h"

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

}  // namespace tilemoe::cuda
