// Descriptions of tensors for the copy engine.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

enum class Swizzle { k64Bytes, k128Bytes };

// A tensor of three dimensions of 16-bit numbers, fastest first. The fastest is contiguous; strides
// and boxes are in elements, the strides multiples of 8. A stride of a dimension of size 1 is free.
struct TensorMapSpec {
  tilemoe_dtype dtype;
  const void* data;
  std::array<int64_t, 3> size;
  std::array<int64_t, 2> stride;  // of the second and the third
  std::array<int, 3> box;
  Swizzle swizzle = Swizzle::k128Bytes;
};

CUtensorMap make_tensor_map(const TensorMapSpec& spec);

}  // namespace tilemoe::cuda
