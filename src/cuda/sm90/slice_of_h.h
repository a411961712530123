// A warp's part of a slice of H in shared memory, 16 rows by 64 columns of A: read in blocks of 16
// columns, and written over by dH.
#pragma once

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/core/slab.h"
#include "cuda/epilogue/activation_gradient.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/vector_copy.h"

namespace tilemoe::cuda::sm90 {

// Two boxes, kPartBytes apart: gate and up columns, or where these are adjacent, the first and the
// last half of both. kParts 1: the one box of an activation without a gate.
template <int kParts, int kPartBytes>
class SliceOfH {
 public:
  static constexpr int kRowBytes = 128;

  // Lane l gives row l % 16, and the left or right 8 of 16 columns.
  __device__ SliceOfH(uint32_t shared, bool adjacent)
      : shared_(shared),
        place_(shared + lane() % slab::kRows * kRowBytes +
               swizzled_chunk(lane(), lane() / slab::kRows)),
        adjacent_(adjacent) {}

  __device__ __forceinline__ void load(int block, PackedBlock& gate, PackedBlock& up) const {
    if (adjacent_) {
      load_adjacent(adjacent_place(block), gate, up);
    } else {
      ptx::ldmatrix_x4(gate, place(block));
      if constexpr (kParts == 2) ptx::ldmatrix_x4(up, place(block) + kPartBytes);
    }
  }
  __device__ __forceinline__ void store(int block, const PackedBlock& gate,
                                        const PackedBlock& up) const {
    if (adjacent_) {
      store_adjacent(adjacent_place(block), gate, up);
    } else {
      store_at(place(block), gate);
      if constexpr (kParts == 2) store_at(place(block) + kPartBytes, up);
    }
  }
  // `offset` bytes further, as one box's.
  __device__ __forceinline__ void store_beside(int block, uint32_t offset,
                                               const PackedBlock& words) const {
    store_at(place(block) + offset, words);
  }

 private:
  __device__ static uint32_t lane() { return threadIdx.x % kWarp; }
  __device__ uint32_t place(int block) const { return place_ ^ block * 32; }
  __device__ static void store_at(uint32_t place, const PackedBlock& words) {
    ptx::stmatrix_x4(place, words[0], words[1], words[2], words[3]);
  }

  // Adjacent: a box of H has 32 columns of A, two blocks. A lane has gate and up of two neighbours,
  // 8 bytes, in four places: of the two halves of the columns, rows l / 4 and l / 4 + 8.
  __device__ uint32_t adjacent_place(int block) const {
    const uint32_t row = lane() / 4, two = lane() % 4;
    return (shared_ + row * kRowBytes + swizzled_chunk(row, two / 2) + two % 2 * 8 +
            block / 2 * kPartBytes) ^
           block % 2 * 64;
  }
  __device__ static uint32_t adjacent_at(uint32_t place, int i) {
    return (place ^ i / 2 * 32) + i % 2 * 8 * kRowBytes;
  }
  __device__ static void load_adjacent(uint32_t place, PackedBlock& gate, PackedBlock& up) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 both = ptx::load_shared_8(adjacent_at(place, i));
      gate[i] = __byte_perm(both.x, both.y, kLowHalves);
      up[i] = __byte_perm(both.x, both.y, kHighHalves);
    }
  }
  __device__ static void store_adjacent(uint32_t place, const PackedBlock& gate,
                                        const PackedBlock& up) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::store_shared_8(adjacent_at(place, i), {__byte_perm(gate[i], up[i], kLowHalves),
                                                  __byte_perm(gate[i], up[i], kHighHalves)});
  }

  static constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;  // of two words

  uint32_t shared_, place_;
  bool adjacent_;
};

}  // namespace tilemoe::cuda::sm90
