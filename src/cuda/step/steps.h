// The forward steps that have kernels, as the backend calls them.
#pragma once

#include "backend.h"

namespace tilemoe::cuda {

template <class Element>
void up_projection(const UpProjection& step);
// bfloat16, plain SwiGLU, W1 contiguous along d: has tiles of its own.
void up_projection_swiglu(const UpProjection& step);

template <class Element>
void down_projection(const DownProjection& step);

void combine(const Combine& step);

}  // namespace tilemoe::cuda
