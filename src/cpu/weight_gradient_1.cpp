// dW1_e = dH_e^T X_e. A task is a tile of one part (gate, up, or both) of one expert's dW1, over
// all of the expert's rows.
#include "cpu/backend.h"
#include "cpu/thread_pool.h"
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
  const UpParts first_parts = parts_of(0);  // alike for every expert
  const int64_t parts = first_parts.end() - first_parts.begin();
  if (parts == 0) return;
  const int64_t inner_tiles = tile_count(first_parts.begin()->columns, kGradientInner);
  const int64_t outer_tiles = tile_count(experts.d, kGradientOuter);
  const int64_t tiles = parts * inner_tiles * outer_tiles;
  parallel_for(step.rows.E * tiles, [&](int64_t task, int worker) {
    const int64_t expert = task / tiles;
    const int64_t first = step.rows.offsets[expert];
    const UpParts expert_parts = parts_of(expert);
    const UpPart& part = expert_parts.begin()[task / (inner_tiles * outer_tiles) % parts];
    const OuterProduct product{.rows = step.rows.offsets[expert + 1] - first,
                               .left = dH.at(first, part.half * experts.n),
                               .right = X.at(first, 0),
                               .out = part.weights,
                               .inner = part.columns,
                               .outer = experts.d,
                               .accumulate = step.accumulate};
    multiply_tile(product, task % inner_tiles, task / inner_tiles % outer_tiles,
                  scratch.worker(worker));
  });
}

}  // namespace tilemoe::cpu
