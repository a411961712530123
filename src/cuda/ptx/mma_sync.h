// A warp's MMA of 16 x 8 x 16, from compute capability 8.0 on: D += A B^T, 16-bit operands and
// float32 sums. Lane l has
//   a[i]  of A (16, 16): row l / 4 + 8 (i % 2), columns 8 (i / 2) + 2 (l % 4) and the next
//   b[i]  of B (8, 16): row l / 4, columns 8 i + 2 (l % 4) and the next
//   d[i]  of D (16, 8): row l / 4 + 8 (i / 2), column 2 (l % 4) + i % 2
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Not volatile: it reads and writes nothing but registers, so that it may move among loads.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace tilemoe::cuda::ptx
