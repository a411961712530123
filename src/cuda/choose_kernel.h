// The GEMM steps, as the backend calls them: which kernel of the arch, and which tile.
#pragma once

#include "core/backend.h"
#include "cuda/core/variant.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {

void up_projection(const UpProjection& step);
void down_projection(const DownProjection& step);
void activation_gradient(const ActivationGradient& step);
void weight_gradient_2(const WeightGradient2& step);
void input_gradient(const InputGradient& step);
void weight_gradient_1(const WeightGradient1& step);
// Of a weight gradient.
size_t weight_gradient_scratch_bytes(Step step, const tilemoe_experts& experts,
                                     const ScratchSizes& sizes);

// The key of a step, and the tile that it takes.
KernelKey key_of(const UpProjection& step);
KernelKey key_of(const DownProjection& step);
KernelKey key_of(const ActivationGradient& step);
KernelKey key_of(const InputGradient& step);
TileConfiguration tile_of(const UpProjection& step);
TileConfiguration tile_of(const DownProjection& step);
TileConfiguration tile_of(const ActivationGradient& step);
TileConfiguration tile_of(const InputGradient& step);

}  // namespace tilemoe::cuda
