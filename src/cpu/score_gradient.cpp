// ds of every pair: the sum of its row's groups of columns, in order, and <dO_t, b2_e>. A task is a
// range of pairs.
#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kPairs = 256;  // of one task

// -1 if the pair has no row.
int64_t row_of_pair(const tilemoe_routing& routing, int64_t pair) {
  switch (routing.spec.kind) {
    case TILEMOE_ROUTING_GROUPED: return pair < routing.offsets[routing.spec.E] ? pair : -1;
    case TILEMOE_ROUTING_ROUNDED:  // slots past the last pair are not in use
      return pair < routing.token_offsets[routing.spec.T] ? routing.pair_row[pair] : -1;
    case TILEMOE_ROUTING_TOP_K:
    case TILEMOE_ROUTING_GENERAL: break;
  }
  return routing.pair_row[pair];
}

int64_t expert_of_row(const tilemoe_routing& routing, int64_t row) {
  const int32_t* first = routing.offsets;
  return std::upper_bound(first, first + routing.spec.E + 1, static_cast<int32_t>(row)) - first - 1;
}

}  // namespace

void score_gradient(const ScoreGradient& step) {
  const tilemoe_routing& routing = *step.routing;
  const int64_t capacity = routing.spec.capacity, groups = ds_groups(step.experts->n);
  const Matrix dO = row_matrix(step.dO);
  parallel_for(tile_count(routing.spec.pairs, kPairs), [&](int64_t task, int) {
    const int64_t end = std::min(routing.spec.pairs, (task + 1) * kPairs);
    for (int64_t pair = task * kPairs; pair < end; ++pair) {
      const int64_t row = row_of_pair(routing, pair);
      float ds = 0;
      if (row >= 0) {
        for (int64_t group = 0; group < groups; ++group)
          ds += step.ds_partial[group * capacity + row];
        if (step.b2.ndim) {
          const int64_t token = routing.row_token ? routing.row_token[row] : row;
          const Matrix b2 = expert_matrix(step.b2, expert_of_row(routing, row));
          ds += dot(dO.row(token), b2.data, dO.dtype, step.experts->d);
        }
      }
      step.ds[pair] = ds;
    }
  });
}

}  // namespace tilemoe::cpu
