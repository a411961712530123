// Warpgroup MMAs and the registers of warpgroups.
//
// wgmma: D (64, N) += A (64, 16) B (N, 16)^T, A and B from shared memory, D in float32 registers.
// Accumulator 4 j + i of lane l in warp w is row 16 w + l / 4 + 8 (i / 2), column
// 8 j + 2 (l % 4) + i % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/core/recipe.h"
#include "cuda/ptx/descriptors.h"

namespace tilemoe::cuda::ptx {

// Called before the first MMA after registers or shared memory were written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define TILEMOE_OUT8(d, i)                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TILEMOE_OUT32(d, i) \
  TILEMOE_OUT8(d, i), TILEMOE_OUT8(d, i + 8), TILEMOE_OUT8(d, i + 16), TILEMOE_OUT8(d, i + 24)
#define TILEMOE_REGISTERS_0                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TILEMOE_REGISTERS_32                                                         \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TILEMOE_REGISTERS_64                                                         \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TILEMOE_REGISTERS_96                                                                     \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// The strings ending in _at number the operands after the accumulators: descriptors of A and B,
// accumulate or not, and whether A and B are MN-major.
#define TILEMOE_WGMMA_OF(n, type, registers, a_at, b_at, accumulate_at, a_mn_at, b_mn_at, ...) \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .pred p;\n"                                                                        \
      "setp.ne.b32 p, " accumulate_at                                                          \
      ", 0;\n"                                                                                 \
      "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers "}, " a_at \
      ", " b_at ", p, 1, 1, " a_mn_at ", " b_mn_at                                             \
      ";\n"                                                                                    \
      "}"                                                                                      \
      : __VA_ARGS__                                                                            \
      : "l"(a), "l"(b), "r"(accumulate), "n"(kAMajor == Major::kMN ? 1 : 0),                   \
        "n"(kBMajor == Major::kMN ? 1 : 0))
#define TILEMOE_WGMMA(n, ...)                 \
  if constexpr (kBF16)                        \
    TILEMOE_WGMMA_OF(n, "bf16", __VA_ARGS__); \
  else                                        \
    TILEMOE_WGMMA_OF(n, "f16", __VA_ARGS__)

// One MMA of 16 steps of the sum; `accumulate` 0 overwrites D. All four warps call it.
template <class Element, int kN, Major kAMajor, Major kBMajor>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b,
                                      int32_t accumulate) {
  constexpr bool kBF16 = std::is_same_v<Element, __nv_bfloat16>;
  static_assert(kBF16 || std::is_same_v<Element, __half>, "bfloat16 or float16");
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256, "no instruction of this width");
  if constexpr (kN == 64) {
    TILEMOE_WGMMA("64", TILEMOE_REGISTERS_0, "%32", "%33", "%34", "%35", "%36",
                  TILEMOE_OUT32(d, 0));
  } else if constexpr (kN == 128) {
    TILEMOE_WGMMA("128", TILEMOE_REGISTERS_0 ", " TILEMOE_REGISTERS_32, "%64", "%65", "%66", "%67",
                  "%68", TILEMOE_OUT32(d, 0), TILEMOE_OUT32(d, 32));
  } else if constexpr (kN == 192) {
    TILEMOE_WGMMA("192", TILEMOE_REGISTERS_0 ", " TILEMOE_REGISTERS_32 ", " TILEMOE_REGISTERS_64,
                  "%96", "%97", "%98", "%99", "%100", TILEMOE_OUT32(d, 0), TILEMOE_OUT32(d, 32),
                  TILEMOE_OUT32(d, 64));
  } else {
    TILEMOE_WGMMA("256",
                  TILEMOE_REGISTERS_0 ", " TILEMOE_REGISTERS_32 ", " TILEMOE_REGISTERS_64
                                      ", " TILEMOE_REGISTERS_96,
                  "%128", "%129", "%130", "%131", "%132", TILEMOE_OUT32(d, 0), TILEMOE_OUT32(d, 32),
                  TILEMOE_OUT32(d, 64), TILEMOE_OUT32(d, 96));
  }
}

// D (64, 128) += A (64, 32) B (128, 32)^T of e4m3, both K-major: one MMA of 32 steps of the sum.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b,
                                           int32_t accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" TILEMOE_REGISTERS_0
      ", " TILEMOE_REGISTERS_32
      "}, %64, %65, p, 1, 1;\n"
      "}"
      : TILEMOE_OUT32(d, 0), TILEMOE_OUT32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

#undef TILEMOE_WGMMA_OF
#undef TILEMOE_WGMMA
#undef TILEMOE_REGISTERS_0
#undef TILEMOE_REGISTERS_32
#undef TILEMOE_REGISTERS_64
#undef TILEMOE_REGISTERS_96
#undef TILEMOE_OUT32
#undef TILEMOE_OUT8

// Moves registers of a CTA between its warpgroups. Every warp of a warpgroup calls it.

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until the other warpgroups of the CTA have released enough registers.
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tilemoe::cuda::ptx
