#include "cuda/layer_gemms.h"

#include <algorithm>
#include <span>

#include "core/check.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/schedule/sizes.h"
#include "cuda/gemm/schedule/splits.h"
#include "cuda/ops/table.h"
#include "cuda/plan.h"

namespace tilemoe::cuda {

void up_projection(const UpProjection& step) {
  start(kernel_of(step), step);
}
void down_projection(const DownProjection& step) {
  start(kernel_of(step), step);
}
void activation_gradient(const ActivationGradient& step) {
  start(kernel_of(step), step);
}
void input_gradient(const InputGradient& step) {
  start(kernel_of(step), step);
}

namespace {

// The properties of the output that a weight gradient kernel is compiled for.
struct GradientOutput {
  bool is_float32;
  OutputMajor major;
  bool operator==(const GradientOutput&) const = default;
};
GradientOutput output_of(const tilemoe_tensor& out) {
  return {.is_float32 = out.dtype == TILEMOE_FLOAT32,
          .major = out.stride[2] == 1 ? OutputMajor::kColumn : OutputMajor::kRow};
}

void run_weight_gradient(WeightGradient step, int32_t workers) {
  if (step.parts == 0) return;
  step.splits = weight_gradient_splits({.dense_columns = step.dense_columns,
                                        .parts = step.parts,
                                        .d = step.gathered.shape[1],
                                        .capacity = step.rows.capacity,
                                        .of_an_expert = step.rows.of_an_expert},
                                       workers_of(workers, device_of(step.tuning.plan).sms));
  const GradientOutput out = output_of(step.part[0].out);
  for (int p = 1; p < step.parts; ++p)
    TILEMOE_ASSERT(output_of(step.part[p].out) == out,
                   "a weight gradient's parts differ in dtype or major");
  const KernelKey key{
      GemmName::kWeightGradient,
      arch_of(step.tuning.plan),
      {.recipe = recipe_of(*step.experts), .float_out = out.is_float32, .out = out.major}};
  const std::span<const TileConfiguration> tiles = tiles_of(key);
  // The tile of a CTA is half of a reference tile.
  const auto tile = std::find_if(tiles.begin(), tiles.end(), [&](const auto& each) {
    return each.block_n == column_block(step.dense_columns);
  });
  TILEMOE_ASSERT(tile != tiles.end(), "a weight gradient without a kernel");
  start(&*tile, step);
}

}  // namespace

size_t weight_gradient_1_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int sms = device_of(sizes.plan).sms;
  return ExpertRanks::bytes(experts.E, weight_gradient_1_splits(experts, sizes, sms));
}
size_t weight_gradient_2_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int sms = device_of(sizes.plan).sms;
  return ExpertRanks::bytes(experts.E, weight_gradient_2_splits(experts, sizes, sms));
}

void weight_gradient_2(const WeightGradient2& step) {
  run_weight_gradient({.experts = step.experts,
                       .rows = step.rows,
                       .dense = step.A_scaled,
                       .dense_columns = step.experts->n,
                       .gathered = step.dO,
                       .part = {{.out = transposed(step.dW2), .dense_first = 0}},
                       .parts = 1,
                       .accumulate = step.accumulate,
                       .scratch = step.scratch,
                       .splits = 0,
                       .stream = step.stream,
                       .tuning = step.tuning},
                      step.workers);
}

void weight_gradient_1(const WeightGradient1& step) {
  const bool interleaved_columns = has_interleaved_columns(*step.experts, step.W1);
  const UpParts parts = up_parts(*step.experts, step.dW1, step.dW1_up, interleaved_columns);
  WeightGradient gradient{.experts = step.experts,
                          .rows = step.rows,
                          .dense = step.dH,
                          .dense_columns = parts.columns,
                          .gathered = step.X,
                          .part = {},
                          .parts = 0,
                          .accumulate = step.accumulate,
                          .scratch = step.scratch,
                          .splits = 0,
                          .stream = step.stream,
                          .tuning = step.tuning};
  for (int p = 0; p < parts.count; ++p) {
    const tilemoe_tensor& out = parts.part[p];
    if (!present(out)) continue;
    // A launch has outputs of one dtype and one major: parts that differ take one launch each.
    if (gradient.parts > 0 && output_of(gradient.part[0].out) != output_of(out)) {
      run_weight_gradient(gradient, step.workers);
      gradient.parts = 0;
    }
    gradient.part[gradient.parts++] = {.out = out, .dense_first = p * parts.columns};
  }
  run_weight_gradient(gradient, step.workers);
}

}  // namespace tilemoe::cuda
