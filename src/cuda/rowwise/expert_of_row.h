// The expert that a row belongs to.
#pragma once

#include <cstdint>

namespace tilemoe::cuda {

// offsets (E + 1) ascend and offsets[0] <= row < offsets[E]; experts without rows are skipped.
__device__ __forceinline__ int32_t expert_of_row(const int32_t* offsets, int32_t E, int32_t row) {
  int32_t low = 0, high = E;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

}  // namespace tilemoe::cuda
