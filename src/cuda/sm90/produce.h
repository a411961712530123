// The producer's part of a grouped GEMM: brings both operands' k blocks, and what the epilogue
// reads, into the ring.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/load/produce.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90/parts.h"

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
    if constexpr (Gemm::kThreadsCopy) ring.wait_empty(at);
    const uint32_t full = ring.full(at.stage);
    if (threadIdx.x == 0) {
      if constexpr (!Gemm::kThreadsCopy) ring.wait_empty(at);  // (of no kernel yet: all copy rows)
      ptx::mbarrier_arrive_expect_bytes(full, Load::kTmaBytes);
      load.load(shared + at.stage * Gemm::kStageBytes, full, block);
    }
    if constexpr (Gemm::kThreadsCopy) ptx::mbarrier_arrive(full);
  }
}

template <class Gemm>
__device__ __forceinline__ void produce(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared) {
  load::produce<Gemm>(
      params, ring, shared, [] { return threadIdx.x == 0; },
      [&](typename Gemm::Ring::Position& at, const Tile& tile) {
        if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
          produce_for_epilogue<Gemm>(params, ring, at, shared, tile);
      });
}

}  // namespace tilemoe::cuda::sm90
