// A stage of operand B as TMA boxes. The CTAs of a cluster that share the operand load the boxes
// alternately, each box by multicast to all CTAs.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::load {

// Copies to this CTA, or to the same address in every CTA of its cluster.
template <int kCtas>
struct BoxCopy {
  template <class... Place>
  __device__ static void load(uint32_t shared, const CUtensorMap* map, uint32_t full,
                              Place... place) {
    if constexpr (kCtas > 1)
      ptx::tma_load_multicast(shared, map, full, (1 << kCtas) - 1, place...);
    else
      ptx::tma_load(shared, map, full, place...);
  }
};

// Loads the boxes of this CTA, each by loader.load_box(copy, number, stage...).
template <int kBoxes, int kCluster, class Loader, class... Stage>
__device__ void load_boxes(const Loader& loader, bool shared_by_cluster, Stage... stage) {
  if (kCluster > 1 && shared_by_cluster) {
    const auto rank = static_cast<int32_t>(blockIdx.x % kCluster);
#pragma unroll
    for (int box = 0; box < kBoxes; box += kCluster)
      if (box + rank < kBoxes) loader.load_box(BoxCopy<kCluster>{}, box + rank, stage...);
  } else {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) loader.load_box(BoxCopy<1>{}, box, stage...);
  }
}

}  // namespace tilemoe::cuda::load
