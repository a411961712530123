// A sum that runs over the gate part and then the up part, each filled up with zeros to whole k
// blocks.
#pragma once

#include <cstdint>

namespace tilemoe::cuda {

// A k block counted over both parts, as its part and where it begins there.
struct PartOfSum {
  int32_t part, begin;

  template <int BLOCK_K>
  __device__ static PartOfSum of(int32_t k_block, int32_t blocks_a_part) {
    const int32_t part = k_block >= blocks_a_part ? 1 : 0;
    return {part, (k_block - part * blocks_a_part) * BLOCK_K};
  }
};

// Of the part that `blocks_left` k blocks of the sum begin in.
__device__ __forceinline__ int32_t blocks_left_of_part(int32_t blocks_left, int32_t blocks_a_part) {
  return blocks_left > blocks_a_part ? blocks_left - blocks_a_part : blocks_left;
}

template <class Shape>
int32_t k_blocks_of_a_part(int64_t columns) {
  return static_cast<int32_t>((columns + Shape::BLOCK_K - 1) / Shape::BLOCK_K);
}

}  // namespace tilemoe::cuda
