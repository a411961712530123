// db2_e = sum of s dO, db1_e = sum of dH, over the expert's rows. A task is a range of one expert's
// columns.
#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kColumns = 512;
// Rows are added up in chunks, and the chunks then, so that the error grows with neither alone.
constexpr int64_t kChunk = 128;

// out (columns) = [out +] the sum of scale * row. `out` is a single column.
struct ColumnSums {
  Matrix rows;         // (rows_count, columns)
  const float* score;  // (rows_count); null: 1
  int64_t row_count;
  Matrix out;
  int64_t columns;
  bool accumulate;
};

void add_up(const ColumnSums& sums) {
  alignas(64) float total[kColumns] = {};
  for (int64_t chunk = 0; chunk < sums.row_count; chunk += kChunk) {
    alignas(64) float partial[kColumns] = {};
    const int64_t end = std::min(sums.row_count, chunk + kChunk);
    for (int64_t i = chunk; i < end; ++i)
      add_scaled(sums.rows.row(i), sums.rows.dtype, sums.score ? sums.score[i] : 1.0f, partial,
                 sums.columns);
    add_scaled(partial, TILEMOE_FLOAT32, 1.0f, total, sums.columns);
  }
  if (sums.row_count > 0 || !sums.accumulate)
    from_float(total, sums.out.data, sums.out.dtype, sums.out.row_stride, sums.columns,
               sums.accumulate);
}

// Sums of all experts for one bias, or for one part of it.
template <class OutOf>
void for_each_expert(const Rows& rows, const Matrix& values, const float* score, int64_t width,
                     bool accumulate, OutOf&& out_of) {
  const int64_t tiles = tile_count(width, kColumns);
  parallel_for(rows.E * tiles, [&](int64_t task, int) {
    const int64_t expert = task / tiles;
    const int64_t column = task % tiles * kColumns;
    const int64_t first = rows.offsets[expert];
    add_up({.rows = values.at(first, column),
            .score = score ? score + first : nullptr,
            .row_count = rows.offsets[expert + 1] - first,
            .out = out_of(expert).at(column, 0),
            .columns = std::min(kColumns, width - column),
            .accumulate = accumulate});
  });
}

}  // namespace

void bias_gradient(const BiasGradient& step) {
  const tilemoe_experts& experts = *step.experts;
  if (step.db2.ndim)
    for_each_expert(step.rows, row_matrix(step.dO, step.rows.token), step.rows.score, experts.d,
                    step.accumulate, [&](int64_t e) { return expert_matrix(step.db2, e); });
  if (!step.dH.ndim) return;
  const Matrix dH = row_matrix(step.dH);
  const auto parts_of = [&](int64_t expert) {
    return up_parts(experts, step.db1, step.db1_up, expert, 0, experts.n);
  };
  const UpParts parts = parts_of(0);  // alike for every expert
  for (int64_t p = 0; p < parts.count(); ++p)
    for_each_expert(step.rows, dH.at(0, parts[p].half * experts.n), nullptr, parts[p].columns,
                    step.accumulate, [&](int64_t e) { return parts_of(e)[p].weights; });
}

}  // namespace tilemoe::cpu
