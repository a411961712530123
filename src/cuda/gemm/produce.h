// The producer's part of a grouped GEMM: brings both operands' k blocks into the ring.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda::load {

// Starts TMA for the weights of as many k blocks as the ring has stages. Their number.
template <class Gemm>
__device__ __forceinline__ int32_t load_weights_first(const typename Gemm::Params& params,
                                                      const typename Gemm::Ring& ring,
                                                      uint32_t shared, bool starts_tma) {
  static_assert(!Gemm::kThreadsCopy);
  typename Gemm::LoadB load(params.b, 0);
  typename Gemm::Order order(params.order);
  int32_t stage = 0;
  for (Tile tile; stage < Gemm::Ring::kStages && order.next(tile);) {
    load.begin(tile);
    for (int32_t k_block = 0; k_block < tile.k_blocks && stage < Gemm::Ring::kStages;
         ++k_block, ++stage) {
      if (!starts_tma) continue;
      const uint32_t full = ring.full(stage);
      ptx::mbarrier_arrive_expect_bytes(full, Gemm::kTmaBytes);
      load.load(shared + stage * Gemm::kStageBytes + Gemm::LoadA::Operand::kBytes, full, k_block);
    }
  }
  return stage;
}

// `shared` is the ring's first stage. starts_tma() is true in one thread of the first warp, all of
// which call it. Calls after_tile(position in the ring, tile) behind each tile's k blocks: what else
// the arch brings through the ring. Only those wait for an empty stage without whom it is not full
// again: another thread could be so late that the phase it waits for is two behind.
template <class Gemm, class StartsTma, class AfterTile>
__device__ __forceinline__ void produce(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared,
                                        const StartsTma& starts_tma, const AfterTile& after_tile) {
  using LoadA = typename Gemm::LoadA;
  using LoadB = typename Gemm::LoadB;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (!Gemm::kThreadsCopy && thread >= kWarp) return;  // one thread starts TMA

  LoadA load_a(params.a, thread);
  LoadB load_b(params.b, thread);
  int32_t have_weights = 0;  // k blocks
  if constexpr (Gemm::kWeightsFirst) {
    have_weights = load_weights_first<Gemm>(params, ring, shared, starts_tma());
    pdl_wait();
  }
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  for (Tile tile; order.next(tile);) {
    load_a.begin(tile);
    load_b.begin(tile);
    for (int32_t k_block = 0; k_block < tile.k_blocks; ++k_block, at.advance()) {
      if constexpr (Gemm::kThreadsCopy) ring.wait_empty(at);
      const uint32_t stage_a = shared + at.stage * Gemm::kStageBytes;
      const uint32_t stage_b = stage_a + LoadA::Operand::kBytes;
      if (starts_tma()) {
        if constexpr (!Gemm::kThreadsCopy) ring.wait_empty(at);
        const uint32_t full = ring.full(at.stage);
        const bool has_weights = Gemm::kWeightsFirst && have_weights > 0;
        if (!has_weights) ptx::mbarrier_arrive_expect_bytes(full, Gemm::kTmaBytes);
        if constexpr (!copies_by_threads<LoadA>) load_a.load(stage_a, full, k_block);
        if constexpr (!copies_by_threads<LoadB>)
          if (!has_weights) load_b.load(stage_b, full, k_block);
      }
      --have_weights;
      if constexpr (copies_by_threads<LoadA>) load_a.copy(stage_a, k_block);
      if constexpr (copies_by_threads<LoadB>) load_b.copy(stage_b, k_block);
      if constexpr (Gemm::kThreadsCopy) ptx::cp_async_arrive(ring.full(at.stage));
    }
    after_tile(at, tile);
  }
}

}  // namespace tilemoe::cuda::load
