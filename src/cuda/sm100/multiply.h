// The multiplying warp's part of a grouped GEMM: one of its lanes starts the products of every tile
// and tells by tcgen05.commit when they are done: a stage, to the producer, and a tile, to the
// storing warps. It never waits for its own products.
//
// Of a pair of blocks the first one's starts both blocks' products, and tells both. The other's
// tells the first one of its stages: copies by threads, when they land, can arrive in their own
// block alone.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/ptx/elect.h"
#include "cuda/ptx/proxy_fence.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/uniform.h"
#include "cuda/sm100/shape.h"

namespace tilemoe::cuda::sm100 {

// Of products that this thread has started, when they are done.
template <int kBlocks>
__device__ __forceinline__ void tell_when_done(uint32_t barrier) {
  if constexpr (kBlocks == 2)
    ptx::tcgen05_commit_pair(barrier, 0b11);
  else
    ptx::tcgen05_commit(barrier);
}

// The last commits arrive in this block's memory.
template <class Ring>
__device__ __forceinline__ void wait_for_last(const Ring& ring, typename Ring::Position at) {
  for (int i = 0; i < Ring::kPlaces; ++i, at.advance()) ring.wait_empty(at);
}

// The accumulators begin at `tensor_memory`.
template <class Gemm>
__device__ __forceinline__ void multiply_tiles(const typename Gemm::Params& params,
                                               const typename Gemm::Ring& ring,
                                               const typename Gemm::Accumulators& accumulators,
                                               uint32_t shared, uint32_t tensor_memory) {
  constexpr int kBlocks = Gemm::Shape::kBlocks;
  const typename Gemm::Products products(shared);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  typename Gemm::Accumulators::Position to;
  for (Tile tile; order.next(tile); to.advance()) {
    const int32_t k_blocks = ptx::uniform(tile.k_blocks);
    const uint32_t D = tensor_memory + to.stage * kAccumulatorColumns;
    accumulators.wait_empty_in_all(to);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
      ring.wait_full_in_all(at);
      __syncwarp();  // (orders nothing: the lane that is elected has waited by itself)
      if (ptx::elect_one()) {
        // The threads' copies arrive by themselves when they land, so that none waits for its own;
        // what they wrote is handed to the tensor cores by the one who waited for it.
        if constexpr (Gemm::kThreadsCopy) ptx::fence_proxy_async();
        ptx::tcgen05_fence_after_sync();
        products.multiply(D, at.stage * Gemm::kStageBytes, k_block == 0);
        tell_when_done<kBlocks>(ring.empty(at.stage));
        if (k_block + 1 == k_blocks) tell_when_done<kBlocks>(accumulators.full(to.stage));
      }
    }
  }
  wait_for_last(ring, at);
}

// By a pair's second block.
template <class Gemm>
__device__ __forceinline__ void tell_of_stages(const typename Gemm::Params& params,
                                               const typename Gemm::Ring& ring) {
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  for (Tile tile; order.next(tile);) {
    const int32_t k_blocks = ptx::uniform(tile.k_blocks);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
      ring.wait_full(at);
      __syncwarp();  // (orders nothing: the elected lane has waited by itself)
      if (ptx::elect_one()) {
        if constexpr (Gemm::kThreadsCopy) ptx::fence_proxy_async();
        ring.tell_full(at.stage);
      }
    }
  }
  wait_for_last(ring, at);
}

}  // namespace tilemoe::cuda::sm100
