// The kernels of the steps that are products, as the table of instances lists them
// (instances/products.inc): a kit, a variant and a tile each.
#pragma once

#include "backend.h"
#include "cuda/core/tile_configuration.h"
#include "cuda/core/variant.h"
#include "cuda/core/weight_gradient.h"

namespace tilemoe::cuda {

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
