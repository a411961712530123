// Functions that every backend compiles to the same arithmetic.
#pragma once

// Always inlined: on the host the caller decides which instructions a function may use, so one text
// is compiled for any CPU and for those with fused multiply-add.
#if defined(__CUDACC__)
#define TILEMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TILEMOE_HOST_DEVICE inline __attribute__((always_inline))
#endif
