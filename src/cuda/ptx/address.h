// Addresses in shared memory, and values that are uniform over a warp. No instruction of its own: the
// simulator compiles this text as it is.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// A number that is the same in all lanes of a warp, and known to be so: it may lie in a uniform
// register, and what takes its operands from there, copies of boxes above all, needs no loop over
// the lanes that agree.

// All lanes of the warp call it.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(0xffffffff, x, 0);
}

// Shared memory as PTX addresses it.

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace tilemoe::cuda::ptx
