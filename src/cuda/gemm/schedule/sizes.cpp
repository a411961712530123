
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

int32_t workers_of(int32_t requested, int sms) {
  return requested > 0 ? requested : std::max(1, sms / 2);
}

int32_t weight_gradient_splits(const WeightGradientSize& size, int32_t workers) {
  const auto reference = ReferenceTiles::of(size.d, size.dense_columns, size.parts);
  return max_splits(reference.count(), size.capacity, std::min(size.of_an_expert, size.capacity),
                    workers);
}

namespace {

// Of a GEMM with `parts` dense parts of `dense_columns` columns and `gathered_columns`.
int32_t splits_of(const ScratchSizes& sizes, int sms, int64_t dense_columns, int parts,
                  int64_t gathered_columns) {
  return weight_gradient_splits({.dense_columns = dense_columns,
                                 .parts = parts,
                                 .d = gathered_columns,
                                 .capacity = sizes.capacity,
                                 .of_an_expert = sizes.rows_of_an_expert},
                                workers_of(sizes.workers, sms));
}

}  // namespace

int32_t weight_gradient_1_splits(const tilemoe_experts& experts, const ScratchSizes& sizes,
                                 int sms) {
  const auto splits = [&](int64_t dense_columns, int parts) {
    return splits_of(sizes, sms, dense_columns, parts, experts.d);
  };
  const int64_t n = experts.n;
  if (!tilemoe_activation_gated(experts.activation)) return splits(n, 1);
  switch (experts.gate_layout) {
    case TILEMOE_GATE_CONCATENATED: return splits(n, 2);
    // Two parts, or one with interleaved gate/up columns, by the strides of the weight.
    case TILEMOE_GATE_INTERLEAVED: return std::max(splits(n, 2), splits(2 * n, 1));
    case TILEMOE_GATE_SPLIT: break;
  }
  // If two outputs may be wanted, either may be wanted alone.
  return sizes.dW1 && sizes.dW1_up ? std::max(splits(n, 2), splits(n, 1)) : splits(n, 1);
}

int32_t weight_gradient_2_splits(const tilemoe_experts& experts, const ScratchSizes& sizes,
                                 int sms) {
  return splits_of(sizes, sms, experts.n, 1, experts.d);
}

int32_t lora_gradient_splits(const tilemoe_experts& experts, const ScratchSizes& sizes, int sms) {
  // Any rank makes one block of dense columns, and one or two blocks of gathered ones.
  static_assert(TILEMOE_MAX_RANK <= column_block(TILEMOE_MAX_RANK) &&
                TILEMOE_MAX_RANK <= 2 * ReferenceTiles::kRows);
  const int64_t n = experts.n, rank = max_rank(experts);
  if (rank == 0) return 0;
  int32_t splits = splits_of(sizes, sms, rank, 1, experts.d);  // dA1, dB2
  const auto allow = [&](int64_t dense_columns, int parts) {   // dA2, dB1
    for (const int64_t gathered : {std::min<int64_t>(rank, ReferenceTiles::kRows), rank})
      splits = std::max(splits, splits_of(sizes, sms, dense_columns, parts, gathered));
  };
  allow(n, 1);
  if (tilemoe_activation_gated(experts.activation) != 0) allow(n, 2), allow(2 * n, 1);
  return splits;
}

}  // namespace tilemoe::cuda
