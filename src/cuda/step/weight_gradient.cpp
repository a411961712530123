// dW2_e = dO_e^T A'_e and dW1_e = dH_e^T X_e as products of one form.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.h"
#include "cuda/core/device.h"
#include "cuda/schedule/expert_ranks.h"
#include "cuda/schedule/weight_gradient_shares.h"
#include "cuda/step/steps.h"
#include "cuda/step/up_parts.h"

namespace tilemoe::cuda {
namespace {

template <class Element>
void run(const WeightGradientProduct& product) {
  if (column_block(product.dense_columns) == 192)
    weight_gradient<Element, 192>(product);
  else
    weight_gradient<Element, 256>(product);
}

void run(const tilemoe_experts& experts, const WeightGradientProduct& product) {
  if (product.parts == 0) return;
  if (experts.dtype == TILEMOE_FLOAT16)
    run<__half>(product);
  else
    run<__nv_bfloat16>(product);
}

}  // namespace

int32_t weight_gradient_shares(const WeightGradientProduct& product) {
  return weight_gradient_shares({.dense_columns = product.dense_columns,
                                 .parts = product.parts,
                                 .d = product.gathered.shape[1],
                                 .capacity = product.rows.capacity,
                                 .of_an_expert = product.rows.of_an_expert},
                                workers_of(product.workers, current_device().multiprocessors));
}

size_t weight_gradient_scratch_bytes(Step step, const tilemoe_experts& experts,
                                     const ScratchSizes& sizes) {
  return ExpertRanks::bytes(
      experts.E, weight_gradient_shares(step, experts, sizes, current_device().multiprocessors));
}

void weight_gradient_2(const WeightGradient2& step) {
  WeightGradientProduct product{.rows = step.rows,
                                .dense = step.A_scaled,
                                .dense_columns = step.experts->n,
                                .gathered = step.dO,
                                .part = {{.out = transposed(step.dW2), .dense_first = 0}},
                                .parts = 1,
                                .accumulate = step.accumulate,
                                .scratch = step.scratch,
                                .stream = step.stream,
                                .block_turns = step.block_turns,
                                .workers = step.workers};
  run(*step.experts, product);
}

void weight_gradient_1(const WeightGradient1& step) {
  const bool adjacent = has_adjacent_columns(*step.experts, step.W1);
  const UpParts parts = up_parts(*step.experts, step.dW1, step.dW1_up, adjacent);
  WeightGradientProduct product{.rows = step.rows,
                                .dense = step.dH,
                                .dense_columns = parts.columns,
                                .gathered = step.X,
                                .part = {},
                                .parts = 0,
                                .accumulate = step.accumulate,
                                .scratch = step.scratch,
                                .stream = step.stream,
                                .block_turns = step.block_turns,
                                .workers = step.workers};
  for (int p = 0; p < parts.count; ++p)
    if (present(parts.part[p]))
      product.part[product.parts++] = {.out = parts.part[p], .dense_first = p * parts.columns};
  run(*step.experts, product);
}

}  // namespace tilemoe::cuda
