// Slices of H in shared memory, as the activation gradient's epilogue reads them: values, or codes of
// the fp8 recipe.
#pragma once

#include <cstdint>

#include "core/fp8.h"
#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/activation_gradient.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda::sm90 {

// A warp's part of a slice of H in shared memory, 16 rows by 64 columns of A: read in blocks of 16
// columns and overwritten by dH. Two boxes, kPartBytes apart: gate and up columns, or the first and
// last half of interleaved gate/up columns. kParts 1: the one box of an activation without a gate.
template <int kParts, int kPartBytes>
class SliceOfH {
 public:
  static constexpr int kRowBytes = 128;

  // Lane l addresses row l % 16, and the left or right 8 of 16 columns.
  __device__ SliceOfH(uint32_t shared, bool interleaved_columns)
      : SliceOfH(shared, interleaved_columns, lane()) {}
  __device__ SliceOfH(uint32_t shared, bool interleaved_columns, uint32_t lane)
      : shared_(shared),
        place_(shared + lane % fragment::kRows * kRowBytes +
               swizzled_chunk(lane, lane / fragment::kRows)),
        interleaved_columns_(interleaved_columns) {}

  __device__ __forceinline__ void load(int block, PackedBlock& gate, PackedBlock& up) const {
    if (interleaved_columns_) {
      load_interleaved(interleaved_place(block), gate, up);
    } else {
      ptx::ldmatrix_x4(gate, place(block));
      if constexpr (kParts == 2) ptx::ldmatrix_x4(up, place(block) + kPartBytes);
    }
  }
  // Where lane l's 16 columns from 16 (l % 4) on of row l / 4 begin in the slice at 0, and 16 bytes
  // of them, of one box and of row l / 4 or l / 4 + 8 (half 1). Eight lanes read eight chunks.
  __device__ static uint32_t place_of_16(uint32_t lane) {
    const uint32_t row = lane / 4;
    return row * kRowBytes + swizzled_chunk(row, lane % 4 * 2);
  }
  __device__ __forceinline__ static uint4 load_half_of_16(uint32_t place, int part, int half,
                                                          int chunk) {
    return ptx::load_shared_16((place ^ chunk * 16) + part * kPartBytes + half * 8 * kRowBytes);
  }
  __device__ __forceinline__ void store(int block, const PackedBlock& gate,
                                        const PackedBlock& up) const {
    if (interleaved_columns_) {
      store_interleaved(interleaved_place(block), gate, up);
    } else {
      store_at(place(block), gate);
      if constexpr (kParts == 2) store_at(place(block) + kPartBytes, up);
    }
  }
  // `offset` bytes further, as one box's.
  __device__ __forceinline__ void store_at_offset(int block, uint32_t offset,
                                                  const PackedBlock& words) const {
    store_at(place(block) + offset, words);
  }

 private:
  __device__ static uint32_t lane() { return threadIdx.x % kWarp; }
  __device__ uint32_t place(int block) const { return place_ ^ block * 32; }
  __device__ static void store_at(uint32_t place, const PackedBlock& words) {
    ptx::stmatrix_x4(place, words[0], words[1], words[2], words[3]);
  }

  // Interleaved: a box of H has 32 columns of A, two blocks. A lane has gate and up of two
  // neighbouring columns, 8 bytes, in four places: rows l / 4 and l / 4 + 8 of each half of the
  // columns.
  __device__ uint32_t interleaved_place(int block) const {
    const uint32_t row = lane() / 4, two = lane() % 4;
    return (shared_ + row * kRowBytes + swizzled_chunk(row, two / 2) + two % 2 * 8 +
            block / 2 * kPartBytes) ^
           block % 2 * 64;
  }
  __device__ static uint32_t interleaved_at(uint32_t place, int i) {
    return (place ^ i / 2 * 32) + i % 2 * 8 * kRowBytes;
  }
  __device__ static void load_interleaved(uint32_t place, PackedBlock& gate, PackedBlock& up) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 both = ptx::load_shared_8(interleaved_at(place, i));
      gate[i] = __byte_perm(both.x, both.y, kLowHalves);
      up[i] = __byte_perm(both.x, both.y, kHighHalves);
    }
  }
  __device__ static void store_interleaved(uint32_t place, const PackedBlock& gate,
                                           const PackedBlock& up) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::store_shared_8(interleaved_at(place, i), {__byte_perm(gate[i], up[i], kLowHalves),
                                                     __byte_perm(gate[i], up[i], kHighHalves)});
  }

  static constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;  // of two words

  uint32_t shared_, place_;
  bool interleaved_columns_;
};

// The scales of a lane's two rows of H as codes, gate and up, in 128 columns.
struct ScalesOfH {
  float2 of_row[2] = {};

  // `scales`: (capacity, n / 128 rounded up, 2). Rows that do not exist have none.
  __device__ __forceinline__ void read(const float* scales, int32_t n, int32_t row, int32_t row_end,
                                       int32_t column) {
    constexpr auto kWidth = static_cast<int32_t>(kFp8Tile);
    const int32_t blocks = (n + kWidth - 1) / kWidth;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = row + fragment::row(half);
      if (r < row_end)
        of_row[half] = __ldg(reinterpret_cast<const float2*>(scales) +
                             (int64_t{r} * blocks + column / kWidth));
    }
  }
};

// A warp's part of a slice of H as codes, 16 rows by 64 columns of A: read in blocks of 16 columns,
// each of which A' may overwrite.
class SliceOfCodes {
 public:
  static constexpr int kRowBytes = 128;

  // Lane l addresses row l % 16, and gate or up of 16 columns.
  __device__ explicit SliceOfCodes(uint32_t shared)
      : place_(shared + fragment::lane() % fragment::kRows * kRowBytes +
               swizzled_chunk(fragment::lane(), fragment::lane() / fragment::kRows)) {}

  // code * scale, rounded as H in 16 bits is.
  template <class Element>
  __device__ __forceinline__ void load(int block, const ScalesOfH& scales, PackedBlock& gate,
                                       PackedBlock& up, Element) const {
    // Gate of the upper and the lower 8 rows, then up. A word has two codes of the first 8 columns,
    // then two of the others.
    PackedBlock words;
    ptx::ldmatrix_x4(words, place_ ^ block * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const float2 scale = scales.of_row[half];
        gate[2 * group + half] = value_of<Element>(words[half] >> 16 * group, scale.x);
        up[2 * group + half] = value_of<Element>(words[2 + half] >> 16 * group, scale.y);
      }
  }

 private:
  template <class Element>
  __device__ static uint32_t value_of(uint32_t codes, float scale) {
    const float2 two = unpack(ptx::e4m3_to_float16(static_cast<uint16_t>(codes)), __half());
    return pack(two.x * scale, two.y * scale, Element());
  }

  uint32_t place_;
};

}  // namespace tilemoe::cuda::sm90
