// What the choice of a tile knows of a step: the rows' number, the experts and the widths alone.
#pragma once

#include "backend.h"
#include "cuda/schedule/cost.h"

namespace tilemoe::cuda {

ProjectionSize size_of(const UpProjection& step);
ProjectionSize size_of(const DownProjection& step);
ProjectionSize size_of(const InputGradient& step);
ProjectionSize size_of(const ActivationGradient& step);

}  // namespace tilemoe::cuda
