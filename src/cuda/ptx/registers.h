// How a block's registers are split between its warpgroups. Every warp of a warpgroup calls it.
#pragma once

namespace tilemoe::cuda::ptx {

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until the block's other warpgroups have released as many.
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tilemoe::cuda::ptx
