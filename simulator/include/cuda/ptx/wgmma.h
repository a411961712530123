// Simulated: warpgroup MMAs (src/cuda/ptx/wgmma.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/recipe.h"
#include "cuda/ptx/descriptors.h"

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void wgmma_fence() {
  simulator::fence_wgmma();
}
__device__ __forceinline__ void wgmma_commit() {
  simulator::commit_wgmma();
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  simulator::wait_wgmma(kPending);
}

template <class Element, int kN, Major kAMajor, Major kBMajor>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b,
                                      int32_t accumulate) {
  constexpr bool kBF16 = std::is_same_v<Element, __nv_bfloat16>;
  static_assert(kBF16 || std::is_same_v<Element, __half>, "bfloat16 or float16");
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256, "no instruction of this width");
  simulator::multiply_wgmma(kBF16, kN, d, a, b, accumulate != 0, kAMajor == Major::kMN,
                            kBMajor == Major::kMN);
}

__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b,
                                           int32_t accumulate) {
  simulator::multiply_wgmma_e4m3(128, d, a, b, accumulate != 0);
}

// The simulator has no limit on registers.

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
}
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
}

}  // namespace tilemoe::cuda::ptx
