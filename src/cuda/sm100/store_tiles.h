// A storing warp's part of a grouped GEMM: finishes its rows of every tile while the next one's
// products run.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/sm100/shape.h"
#include "cuda/sm100/warp_accumulators.h"

namespace tilemoe::cuda::sm100 {

// `tensor_memory` is the warp's first lane of the first accumulator.
template <class Gemm>
__device__ __forceinline__ void store_tiles(const typename Gemm::Params& params,
                                            const typename Gemm::Accumulators& accumulators,
                                            uint32_t tensor_memory) {
  const typename Gemm::Epilogue epilogue(params.epilogue);
  typename Gemm::Order order(params.order);
  typename Gemm::Accumulators::Position from;
  for (Tile tile; order.next(tile); from.advance()) {
    accumulators.wait_full(from);
    // (Neither this nor the one below orders anything: loads from tensor memory and the wait for
    // them are the whole warp's.)
    __syncwarp();
    ptx::tcgen05_fence_after_sync();
    epilogue.store(WarpAccumulators(tensor_memory + from.stage * kAccumulatorColumns), tile);
    ptx::tcgen05_fence_before_sync();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) accumulators.tell_empty(from.stage);
  }
}

}  // namespace tilemoe::cuda::sm100
