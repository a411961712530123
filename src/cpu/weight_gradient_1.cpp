// dW1_e = dH_e^T X_e, by parts where gate and up rows are not one matrix.
#include "cpu/backend.h"
#include "cpu/up_weights.h"
#include "cpu/weight_gradient.h"

namespace tilemoe::cpu {

void CpuBackend::weight_gradient_1(const WeightGradient1& step) {
  const tilemoe_experts& experts = *step.experts;
  const StepScratch scratch(experts, step.rows.capacity, step.scratch);
  const Matrix dH = row_matrix(step.dH);
  const Matrix X = row_matrix(step.X, step.rows.token);
  const auto parts_of = [&](int64_t expert) {
    return up_parts(experts, step.dW1, step.dW1_up, expert, 0, experts.n);
  };
  for (int64_t p = 0; p < parts_of(0).count(); ++p)
    sum_outer_products(step.rows, step.accumulate, scratch, [&](int64_t expert) {
      const UpPart part = parts_of(expert)[p];
      return OuterProduct{.left = dH.at(0, part.half * experts.n),
                          .right = X,
                          .out = part.weights,
                          .rows = part.columns,
                          .columns = experts.d};
    });
}

}  // namespace tilemoe::cpu
