// One lane of a warp, the same each time, in a way that the compiler knows to be one.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// All lanes of the warp call it.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace tilemoe::cuda::ptx
