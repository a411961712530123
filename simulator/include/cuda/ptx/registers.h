// Simulated: there is no lack of registers (src/cuda/ptx/registers.h).
#pragma once

namespace tilemoe::cuda::ptx {

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
}
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
}

}  // namespace tilemoe::cuda::ptx
