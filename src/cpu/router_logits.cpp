// Logits of a router. A task is a tile of tokens by a range of experts. A token's bits are those of
// multiply(), whatever the tile.
#include <algorithm>

#include "core/check.h"
#include "core/dtype.h"
#include "core/numbers.h"
#include "cpu/cpu_backend.h"
#include "cpu/gemm.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kTaskRows = kTileRows, kTaskExperts = kOuterColumns;

// Floats of one worker: a tile of logits, and the operands of its GEMM.
struct TaskScratch {
  int64_t rows, columns, tile, panels;

  TaskScratch(int64_t T, int64_t E, int64_t d)
      : rows(std::min(T, kTaskRows)),
        columns(std::min(E, kTaskExperts)),
        tile(rows * columns),
        panels(panel_floats(rows, columns, d)) {}
  int64_t floats() const { return tile + panels; }
};

// E may be any number, unlike the counts of elementwise.h.
void add_bias(const tilemoe_tensor& bias, int64_t first, int64_t rows, int64_t columns,
              float* sums) {
  with_float(bias.dtype, [&]<class Element>() {
    const Element* const from = static_cast<const Element*>(bias.data) + first;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t e = 0; e < columns; ++e) sums[i * columns + e] += to_float(from[e]);
  });
}
void store_logits(const tilemoe_tensor& logits, int64_t row, int64_t first, int64_t rows,
                  int64_t columns, const float* sums) {
  with_float(logits.dtype, [&]<class Logit>() {
    for (int64_t i = 0; i < rows; ++i) {
      Logit* const to = row_of<Logit>(logits, row + i) + first;
      for (int64_t e = 0; e < columns; ++e) store(sums[i * columns + e], to[e]);
    }
  });
}

}  // namespace

size_t router_logits_scratch_bytes(int64_t T, int64_t E, int64_t d, tilemoe_dtype /*weight*/) {
  if (T == 0) return 0;
  return static_cast<size_t>(TaskScratch(T, E, d).floats() * num_threads()) * sizeof(float);
}

void router_logits(const tilemoe_router_logits_args& args) {
  const int64_t T = args.X.shape[0], d = args.X.shape[1], E = args.weight.shape[0];
  if (T == 0) return;
  const TaskScratch scratch(T, E, d);
  const Matrix X = row_matrix(args.X), weight = row_matrix(args.weight);
  const int64_t column_tiles = tile_count(E, kTaskExperts);
  parallel_for(tile_count(T, kTaskRows) * column_tiles, [&](int64_t task, int worker) {
    const int64_t row = task / column_tiles * kTaskRows, rows = std::min(kTaskRows, T - row);
    const int64_t first = task % column_tiles * kTaskExperts;
    const int64_t columns = std::min(kTaskExperts, E - first);
    float* const sums = static_cast<float*>(args.workspace) + worker * scratch.floats();
    multiply(rows, columns, d, X.at(row, 0), weight.at(first, 0).transposed(), /*add=*/false, sums,
             columns, sums + scratch.tile);
    if (present(args.bias)) add_bias(args.bias, first, rows, columns, sums);
    store_logits(args.logits, row, first, rows, columns, sums);
  });
}

}  // namespace tilemoe::cpu
