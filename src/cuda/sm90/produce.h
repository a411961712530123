// The producer's part of a grouped GEMM: brings both operands' k blocks, and what the epilogue
// reads, into the ring.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/sm90/parts.h"
#include "cuda/sm90/ring.h"

namespace tilemoe::cuda::sm90 {

// Brings what the tile's epilogue reads; the threads that copy k blocks arrive with empty hands.
template <class Gemm>
__device__ __forceinline__ void produce_for_epilogue(const typename Gemm::Params& params,
                                                     const typename Gemm::Ring& ring,
                                                     typename Gemm::Ring::Position& at,
                                                     uint32_t shared, const Tile& tile) {
  using Load = typename Gemm::Epilogue::Load;
  static_assert(Gemm::Shape::kSchedule == Schedule::kCooperative, "consumers pass every block");
  static_assert(Load::kBlockBytes <= Gemm::kStageBytes);
  Load load(params.epilogue);
  load.begin(tile);
  for (int32_t block = 0; block < Load::kBlocks; ++block, at.advance()) {
    ring.wait_empty(at);
    const uint32_t full = ring.full(at.stage);
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_bytes(full, Load::kTmaBytes);
      load.load(shared + at.stage * Gemm::kStageBytes, full, block);
    }
    if constexpr (Gemm::kThreadsCopy) ptx::mbarrier_arrive(full);
  }
}

template <class Gemm>
__device__ __forceinline__ void produce(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared) {
  using LoadA = typename Gemm::LoadA;
  using LoadB = typename Gemm::LoadB;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (!Gemm::kThreadsCopy && thread >= kWarp) return;  // one thread starts TMA

  LoadA load_a(params.a, thread);
  LoadB load_b(params.b, thread);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  for (Tile tile; order.next(tile);) {
    load_a.begin(tile);
    load_b.begin(tile);
    for (int32_t k_block = 0; k_block < tile.k_blocks; ++k_block, at.advance()) {
      ring.wait_empty(at);
      const uint32_t stage_a = shared + at.stage * Gemm::kStageBytes;
      const uint32_t stage_b = stage_a + LoadA::Operand::kBytes;
      if (thread == 0) {
        const uint32_t full = ring.full(at.stage);
        ptx::mbarrier_arrive_expect_bytes(full, Gemm::kTmaBytes);
        if constexpr (!copies_by_threads<LoadA>) load_a.load(stage_a, full, k_block);
        if constexpr (!copies_by_threads<LoadB>) load_b.load(stage_b, full, k_block);
      }
      if constexpr (copies_by_threads<LoadA>) load_a.copy(stage_a, k_block);
      if constexpr (copies_by_threads<LoadB>) load_b.copy(stage_b, k_block);
      if constexpr (Gemm::kThreadsCopy) ptx::cp_async_arrive(ring.full(at.stage));
    }
    if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
      produce_for_epilogue<Gemm>(params, ring, at, shared, tile);
  }
}

}  // namespace tilemoe::cuda::sm90
