// The kernels of the steps that are products, as the table of instances lists them
// (instances/products.inc): a kit, a variant and a tile each.
#pragma once

#include "backend.h"
#include "cuda/core/tile_configuration.h"
#include "cuda/core/variant.h"

namespace tilemoe::cuda {

// What the weight gradients have in common: per expert and part, out = [out +] the sum over the
// expert's rows of dense^T gathered. The parts' outputs have one dtype and one major.
struct WeightGradient {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor dense;     // (capacity, columns)
  int64_t dense_columns;    // of a part
  tilemoe_tensor gathered;  // (T, d)
  struct Part {
    tilemoe_tensor out;   // (E, dense_columns, d)
    int64_t dense_first;  // column of `dense`
  } part[2];
  int parts;
  bool accumulate;
  Scratch scratch;
  int32_t shares;  // of long experts, at most; see schedule/weight_gradient_shares.h
  void* stream;
  Tuning tuning = {};
};
// Starts a kernel: defined in the step's header, instantiated by the table.
template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const UpProjection& step);
template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const DownProjection& step);
template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const ActivationGradient& step);
template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const InputGradient& step);
template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const WeightGradient& step);

}  // namespace tilemoe::cuda
