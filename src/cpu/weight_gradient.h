// What both weight gradients share: per expert, the sum over its rows of an outer product.
#pragma once

#include "backend.h"
#include "cpu/matrix.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {

// out (inner, outer) = [out +] left^T right over `rows` rows, where left (rows, inner) is of H's or
// A's width and right (rows, outer) of X's or dO's. No rows: zero, or nothing to add. A tile is
// kGradientInner by kGradientOuter.
struct OuterProduct {
  int64_t rows;
  Matrix left, right;
  Matrix out;
  int64_t inner, outer;
  bool accumulate;
};
void multiply_tile(const OuterProduct& product, int64_t inner_tile, int64_t outer_tile,
                   const WorkerScratch& scratch);

}  // namespace tilemoe::cpu
