// The named barriers of a grouped GEMM's block, one a direction.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::sm90 {

enum class NamedBarrier : uint32_t {
  kBlock = 0,  // __syncthreads()
  kTurn0 = 1,  // ping-pong: consumer 1 tells consumer 0 that the ring is its
  kTurn1 = 2,
  kStore0 = 3,  // the warps of a consumer that store together
  kStore1 = 4,
};

__device__ constexpr uint32_t number_of(NamedBarrier first, int consumer) {
  return static_cast<uint32_t>(first) + static_cast<uint32_t>(consumer);
}

}  // namespace tilemoe::cuda::sm90
