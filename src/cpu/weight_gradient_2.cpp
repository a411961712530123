// dW2_e = dO_e^T A'_e.
#include "cpu/backend.h"
#include "cpu/weight_gradient.h"

namespace tilemoe::cpu {

void CpuBackend::weight_gradient_2(const WeightGradient2& step) {
  const tilemoe_experts& experts = *step.experts;
  const StepScratch scratch(experts, step.rows.capacity, step.scratch);
  const Matrix dO = row_matrix(step.dO, step.rows.token);
  const Matrix A_scaled = row_matrix(step.A_scaled);
  sum_outer_products(step.rows, step.accumulate, scratch, [&](int64_t expert) {
    return OuterProduct{.left = dO,
                        .right = A_scaled,
                        .out = expert_matrix(step.dW2, expert),
                        .rows = experts.d,
                        .columns = experts.n};
  });
}

}  // namespace tilemoe::cpu
