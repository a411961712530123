// dW2_e = dO_e^T A'_e and dW1_e = dH_e^T X_e as products of one form.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "check.h"
#include "cuda/device.h"
#include "cuda/schedule/configuration.h"
#include "cuda/schedule/expert_ranks.h"
#include "cuda/step/steps.h"
#include "cuda/step/up_parts.h"

namespace tilemoe::cuda {
namespace {

template <class Element>
void run(const WeightGradientProduct& product) {
  if (column_block(product.dense_columns) == kCooperative192Pairs.block_n)
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

int64_t blocks(int64_t size, int64_t block) {
  return (size + block - 1) / block;
}

}  // namespace

int32_t weight_gradient_shares(int64_t dense_columns, int parts, int64_t d, int64_t capacity) {
  constexpr TileConfiguration kTile = kCooperative256Pairs;
  const int64_t n_blocks = parts * blocks(dense_columns, column_block(dense_columns));
  return shares_at_most(expert_tiles(blocks(d, kTile.block_m), n_blocks, kTile.cluster), capacity,
                        current_device().multiprocessors / kTile.cluster);
}

size_t weight_gradient_scratch_bytes(Step step, const tilemoe_experts& experts, int64_t capacity) {
  const int64_t n = experts.n;
  const bool two_parts =
      step == Step::kWeightGradient1 && tilemoe_activation_gated(experts.activation) != 0;
  // One part of two may be asked for, and two may lie in each other's columns.
  int32_t shares = weight_gradient_shares(n, 1, experts.d, capacity);
  if (two_parts)
    shares = std::max({shares, weight_gradient_shares(2 * n, 1, experts.d, capacity),
                       weight_gradient_shares(n, 2, experts.d, capacity)});
  return ExpertRanks::bytes(experts.E, shares);
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
                                .stream = step.stream};
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
                                .stream = step.stream};
  for (int p = 0; p < parts.count; ++p)
    if (present(parts.part[p]))
      product.part[product.parts++] = {.out = parts.part[p], .dense_first = p * parts.columns};
  run(*step.experts, product);
}

}  // namespace tilemoe::cuda
