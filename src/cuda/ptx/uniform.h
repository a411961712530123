// A number that is the same in all lanes of a warp, and known to be so: it may lie in a uniform
// register, and what takes its operands from there, copies of boxes above all, needs no loop over
// the lanes that agree.
#pragma once

namespace tilemoe::cuda::ptx {

// All lanes of the warp call it.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(0xffffffff, x, 0);
}

}  // namespace tilemoe::cuda::ptx
