// Code that these tests' tcgen05 kernels have in common: the barriers of two stages and of two
// accumulators, a warp that fills a stage, and the launch of a kernel chosen when the test runs.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/gemm/load/stage.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"

namespace tilemoe::simulator_test {

constexpr int kStages = 2;
constexpr int kMultiplying = 4, kProducing = 5;  // warps; those before them store

struct Barriers {
  uint64_t full[kStages], empty[kStages];  // stages of A
  uint64_t done[kStages], taken[kStages];  // accumulators
  __device__ static uint32_t at(uint64_t& barrier) { return cuda::ptx::shared_address(&barrier); }
  __device__ static uint32_t in_first(uint64_t& barrier) {  // CTA of a cluster
    return cuda::ptx::cluster_address(at(barrier), 0);
  }
};

struct Pass {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// A warp writes rows of 16 numbers to swizzled rows of 128 bytes.
__device__ inline void stage_rows(uint8_t* to, const uint16_t* from, int rows) {
  for (int row = static_cast<int>(threadIdx.x % 32); row < rows; row += 32)
    for (int chunk = 0; chunk < 2; ++chunk) {
      const auto place =
          cuda::swizzled_chunk(static_cast<uint32_t>(row), static_cast<uint32_t>(chunk));
      const auto* const numbers = reinterpret_cast<const uint4*>(from + row * 16 + chunk * 8);
      *reinterpret_cast<uint4*>(to + row * 128 + place) = *numbers;  // stages
    }
}

// Calls launch(kHow as a type) for the kHow in [0, kLast] that equals `how`.
template <auto kLast, class Launch>
void launch_chosen(decltype(kLast) how, const Launch& launch) {
  using How = decltype(kLast);
  const auto try_each = [&]<int... kHow>(std::integer_sequence<int, kHow...>) {
    const auto launch_if = [&](auto one) {
      if (how == one()) launch(one);
    };
    (launch_if(std::integral_constant<How, static_cast<How>(kHow)>()), ...);
  };
  try_each(std::make_integer_sequence<int, static_cast<int>(kLast) + 1>());
}

}  // namespace tilemoe::simulator_test
