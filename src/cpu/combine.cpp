// O or dX from the rows of Y or dX~. A task is a range of tokens, or of rows if rows are
// grouped; grouped rows past the last one are zero, and the addend is not read there.
#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kTokens = 64;  // of one task

// The rows of one token: `row[0]` to `row[terms - 1]`.
struct TokenRows {
  const int32_t* row;
  int64_t terms;
};

TokenRows rows_of_token(const tilemoe_routing& routing, int64_t token) {
  if (!routing.token_offsets) return {routing.pair_row + token * routing.spec.K, routing.spec.K};
  const int32_t first = routing.token_offsets[token];
  return {routing.pair_row + first, routing.token_offsets[token + 1] - first};
}

}  // namespace

void combine(const Combine& step) {
  const tilemoe_routing& routing = *step.routing;
  const bool grouped = routing.spec.kind == TILEMOE_ROUTING_GROUPED;
  const int64_t d = step.row_values.shape[1];
  const int64_t outputs = grouped ? routing.spec.capacity : routing.spec.T;
  const int32_t M = routing.offsets[routing.spec.E];
  const Matrix rows = row_matrix(step.row_values);
  const Matrix out = row_matrix(step.out);
  const Matrix addend = step.addend.ndim ? row_matrix(step.addend) : Matrix{};

  parallel_for(tile_count(outputs, kTokens), [&](int64_t task, int) {
    const int64_t end = std::min(outputs, (task + 1) * kTokens);
    for (int64_t t = task * kTokens; t < end; ++t) {
      const auto same_row = static_cast<int32_t>(t);
      const bool past_the_last = grouped && t >= M;
      const TokenRows terms = grouped ? TokenRows{&same_row, 1} : rows_of_token(routing, t);
      cpu::sum_rows({.dtype = out.dtype,
                     .addend = addend.data && !past_the_last ? addend.row(t) : nullptr,
                     .rows = rows.data,
                     .row_stride = rows.row_stride,
                     .row = terms.row,
                     .terms = past_the_last ? 0 : terms.terms,
                     .scale = step.scale_by_score ? routing.row_score : nullptr,
                     .out = out.row(t)},
                    d);
    }
  });
}

}  // namespace tilemoe::cpu
