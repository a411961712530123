// Both weight gradients, and those of adapters: per expert, the sum over its rows of outer products.

#include <algorithm>

#include "core/backend.h"
#include "core/check.h"
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/gemm.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {

// out (rows, columns) = [out +] left^T right, summed over some rows of `left` and `right`.
struct OuterProduct {
  Matrix left;   // (M, rows)
  Matrix right;  // (M, columns)
  Matrix out;    // (rows, columns)
  int64_t rows, columns;

  // The same, transposed if the rows of `out` are not contiguous. The bits do not depend on the
  // layout of `out`.
  OuterProduct along_out() const {
    if (out.rows_are_contiguous() || !transposing_keeps_bits()) return *this;
    return {right, left, out.transposed(), columns, rows};
  }
};

// One task: `rows` by `columns` of one GEMM.
struct GradientTile {
  int64_t rows, columns;
};

// The largest tile with which no task has more than an eighth of the work, down to 128 by 128: the
// more of all rows one expert has, the finer its GEMMs are cut. GEMMs with long rows are faster.
GradientTile gradient_tile(const Rows& rows, const OuterProduct& product);

// The tile of `product` that begins at element (i, j), over the rows [first, first + count) of
// `left` and `right`. No rows: zero, or nothing to add.
void sum_tile(const OuterProduct& product, int64_t first, int64_t count, int64_t i, int64_t j,
              const GradientTile& tile, bool accumulate, const WorkerScratch& scratch);

// Sums product_of(expert), alike for every expert, over the expert's rows. A task is a tile of one
// expert's GEMM.
template <class ProductOf>
void sum_outer_products(const Rows& rows, bool accumulate, const StepScratch& scratch,
                        ProductOf&& product_of) {
  const OuterProduct any = product_of(0).along_out();
  const GradientTile tile = gradient_tile(rows, any);
  const int64_t tiles_across = tile_count(any.columns, tile.columns);
  const int64_t tiles = tile_count(any.rows, tile.rows) * tiles_across;
  parallel_for(rows.E * tiles, [&](int64_t task, int worker) {
    const int64_t expert = task / tiles;
    const int64_t first = rows.offsets[expert];
    const int64_t i = task % tiles / tiles_across * tile.rows;
    const int64_t j = task % tiles % tiles_across * tile.columns;
    sum_tile(product_of(expert).along_out(), first, rows.offsets[expert + 1] - first, i, j, tile,
             accumulate, scratch.worker(worker));
  });
}

GradientTile gradient_tile(const Rows& rows, const OuterProduct& product) {
  constexpr int64_t kMinTasks = 8;
  constexpr GradientTile kTiles[] = {
      {kGradientTile, kGradientTile}, {256, 512}, {128, 512}, {128, 256}, {128, 128}};
  int64_t max_rows = 0;
  for (int64_t e = 0; e < rows.E; ++e)
    max_rows = std::max<int64_t>(max_rows, rows.offsets[e + 1] - rows.offsets[e]);
  const double all = static_cast<double>(rows.offsets[rows.E]) *
                     static_cast<double>(product.rows * product.columns);
  GradientTile tile{};
  for (const GradientTile& candidate : kTiles) {
    tile = {std::min(candidate.rows, product.rows), std::min(candidate.columns, product.columns)};
    const double one = static_cast<double>(max_rows * tile.rows * tile.columns);
    if (one * kMinTasks <= all) break;
  }
  return tile;
}

void sum_tile(const OuterProduct& product, int64_t first, int64_t count, int64_t i, int64_t j,
              const GradientTile& size, bool accumulate, const WorkerScratch& scratch) {
  const int64_t rows = std::min(size.rows, product.rows - i);
  const int64_t columns = std::min(size.columns, product.columns - j);
  const OutputTile tile(product.out.at(i, j), rows, columns, scratch.tile);
  if (count == 0) {
    if (accumulate) return;
    for (int64_t row = 0; row < rows; ++row) std::fill_n(tile.row(row), columns, 0.0f);
  }
  bool add = accumulate && tile.in_place();
  for (int64_t done = 0; done < count; done += kDepth) {
    multiply(rows, columns, std::min(kDepth, count - done),
             product.left.at(first + done, i).transposed(), product.right.at(first + done, j), add,
             tile.data(), tile.row_stride(), scratch.panels);
    add = true;
  }
  tile.store(accumulate);
}

// dW1_e = dH_e^T X_e, by parts if gate and up rows are not one matrix.

void weight_gradient_1(const WeightGradient1& step) {
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

// dW2_e = dO_e^T A'_e.

void weight_gradient_2(const WeightGradient2& step) {
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

// P' = scale [s] P, rounded, in the step's scratch; then dA_e = Q_e^T input_e, dB_e = dOut_e^T P'_e.

namespace {

constexpr size_t kAlignment = 64;

// Of P' (capacity, rank).
size_t scaled_bytes(tilemoe_dtype dtype, int64_t capacity, int64_t rank) {
  return round_up(static_cast<size_t>(capacity * rank) * tilemoe_dtype_size(dtype), kAlignment);
}

// Rows past the experts' last are not read.
Matrix scaled_P(const LoraGradient& step, char* memory) {
  const int64_t rank = step.P.shape[1], rows = step.rows.offsets[step.rows.E];
  Matrix scaled = row_matrix(step.P);
  scaled.data = memory, scaled.row_stride = rank;
  const Matrix P = row_matrix(step.P);
  parallel_for(tile_count(rows, kTileRows), [&](int64_t task, int /*worker*/) {
    alignas(64) float values[TILEMOE_MAX_RANK];
    const int64_t end = std::min(rows, (task + 1) * kTileRows);
    for (int64_t r = task * kTileRows; r < end; ++r) {
      const bool scores = !step.gathers_input && step.rows.score != nullptr;
      const float scale = step.scale * (scores ? step.rows.score[r] : 1.0f);
      to_float(P.row(r), P.dtype, 1, values, rank);
      for (int64_t j = 0; j < rank; ++j) values[j] *= scale;
      from_float(values, scaled.row(r), scaled.dtype, 1, rank, /*add=*/false);
    }
  });
  return scaled;
}

}  // namespace

size_t lora_gradient_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int64_t rank = std::max(experts.rank_1, experts.rank_2);
  return kAlignment + scaled_bytes(experts.dtype, sizes.capacity, rank) +
         StepScratch::bytes(experts, sizes.capacity);
}

void lora_gradient(const LoraGradient& step) {
  const tilemoe_experts& experts = *step.experts;
  const int64_t rank = step.P.shape[1];
  const auto address = reinterpret_cast<uintptr_t>(step.scratch.data);
  char* const memory =
      static_cast<char*>(step.scratch.data) + (round_up(address, kAlignment) - address);
  const size_t used = static_cast<size_t>(memory - static_cast<char*>(step.scratch.data)) +
                      scaled_bytes(experts.dtype, step.rows.capacity, rank);
  const StepScratch scratch(
      experts, step.rows.capacity,
      {static_cast<char*>(step.scratch.data) + used, step.scratch.bytes - used});
  const int32_t* const token = step.rows.token;
  const Matrix input = row_matrix(step.input, step.gathers_input ? token : nullptr);
  const Matrix dOut = row_matrix(step.dOut, step.gathers_input ? nullptr : token);
  if (present(step.dA)) {
    const Matrix Q = row_matrix(step.Q);
    sum_outer_products(step.rows, step.accumulate, scratch, [&](int64_t expert) {
      return OuterProduct{.left = Q,
                          .right = input,
                          .out = expert_matrix(step.dA, expert),
                          .rows = rank,
                          .columns = step.input.shape[1]};
    });
  }
  if (step.parts == 0) return;
  const Matrix P = scaled_P(step, memory);
  for (int p = 0; p < step.parts; ++p) {
    const LoraGradient::Part& part = step.part[p];
    sum_outer_products(step.rows, step.accumulate, scratch, [&](int64_t expert) {
      return OuterProduct{.left = dOut.at(0, part.first),
                          .right = P,
                          .out = expert_matrix(part.dB, expert),
                          .rows = part.dB.shape[1],
                          .columns = rank};
    });
  }
}

}  // namespace tilemoe::cpu
