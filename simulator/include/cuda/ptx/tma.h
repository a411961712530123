// Simulated: TMA (src/cuda/ptx/tma.h).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap*) {}

// Coordinates, fastest dimension first.
template <class... More>
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                         int32_t x, int32_t y, int32_t z, More... more) {
  const int32_t coordinates[] = {x, y, z, more...};
  simulator::load_box_async(shared, map, barrier, 0, coordinates, 3 + sizeof...(more));
}
template <class... More>
__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const CUtensorMap* map,
                                                   uint32_t barrier, uint16_t blocks, int32_t x,
                                                   int32_t y, int32_t z, More... more) {
  const int32_t coordinates[] = {x, y, z, more...};
  simulator::load_box_async(shared, map, barrier, blocks, coordinates, 3 + sizeof...(more));
}
template <class... More>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t shared, int32_t x,
                                          int32_t y, int32_t z, More... more) {
  const int32_t coordinates[] = {x, y, z, more...};
  simulator::store_box_async(map, shared, coordinates, 3 + sizeof...(more));
}
__device__ __forceinline__ void tma_store_commit() {
  simulator::commit_box_stores();
}
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  simulator::wait_box_stores(kPending, false);
}
__device__ __forceinline__ void tma_store_wait() {
  simulator::wait_box_stores(0, true);
}

}  // namespace tilemoe::cuda::ptx
