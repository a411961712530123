// dW2_e = dO_e^T A'_e. A task is a tile of one expert's dW2, over all of the expert's rows.
#include "cpu/backend.h"
#include "cpu/thread_pool.h"
#include "cpu/weight_gradient.h"

namespace tilemoe::cpu {

void CpuBackend::weight_gradient_2(const WeightGradient2& step) {
  const tilemoe_experts& experts = *step.experts;
  const StepScratch scratch(experts, step.rows.capacity, step.scratch);
  const Matrix A_scaled = row_matrix(step.A_scaled);
  const Matrix dO = row_matrix(step.dO, step.rows.token);
  const int64_t inner_tiles = tile_count(experts.n, kGradientInner);
  const int64_t outer_tiles = tile_count(experts.d, kGradientOuter);
  const int64_t tiles = inner_tiles * outer_tiles;
  parallel_for(step.rows.E * tiles, [&](int64_t task, int worker) {
    const int64_t expert = task / tiles;
    const int64_t first = step.rows.offsets[expert];
    const OuterProduct product{.rows = step.rows.offsets[expert + 1] - first,
                               .left = A_scaled.at(first, 0),
                               .right = dO.at(first, 0),
                               .out = expert_matrix(step.dW2, expert).transposed(),
                               .inner = experts.n,
                               .outer = experts.d,
                               .accumulate = step.accumulate};
    multiply_tile(product, task % inner_tiles, task / inner_tiles % outer_tiles,
                  scratch.worker(worker));
  });
}

}  // namespace tilemoe::cpu
