// Where an epilogue's rows go, and how a consumer gets them there.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/gemm/shape.h"
#include "cuda/ptx/proxy_fence.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/vector_copy.h"

namespace tilemoe::cuda {

// A matrix (rows, parts, columns), contiguous but for its rows: H has a gate and an up part, so
// that a box of columns never spills from one into the other.
struct Output {
  CUtensorMap map;  // boxes of (kStoreRows, 1, slice of columns)
  void* data;
  int64_t row_bytes;
  int32_t columns;  // of one part
};

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// A slice of a tile's columns: as wide as a swizzled row can be.
constexpr int slice_columns(int columns) {
  return columns % 64 == 0 ? 64 : 32;
}

// Rows of accumulators that one warp has of an instruction's 64, and stores by itself.
constexpr int kStoreRows = 16;

// Sends a warp's slot of kSlice columns, visible to the copy engine and to the warp's lanes: whole
// by the copy engine, whose group is still to be closed, or by the lanes, those rows that exist.
template <class Element, int kSlice>
__device__ __forceinline__ void send_rows(const Output& out, uint32_t slot, int32_t row,
                                          int32_t rows, int32_t part, int32_t column) {
  constexpr int32_t kRowBytes = kSlice * static_cast<int32_t>(sizeof(Element));
  constexpr int32_t kChunks = kRowBytes / 16;
  const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
  if (rows >= kStoreRows) {
    if (lane == 0) ptx::tma_store(&out.map, slot, column, part, row);
    return;
  }
  char* first = static_cast<char*>(out.data) + row * out.row_bytes +
                (static_cast<int64_t>(part) * out.columns + column) * sizeof(Element);
#pragma unroll 1
  for (int32_t i = lane; i < rows * kChunks; i += kWarp) {
    const int32_t r = i / kChunks, chunk = i % kChunks;
    if (column + chunk * (kSlice / kChunks) >= out.columns) continue;
    const uint32_t swizzle = r * kRowBytes >> 7 & (kChunks - 1);
    *reinterpret_cast<uint4*>(first + r * out.row_bytes + chunk * 16) =
        ptx::load_shared_16(slot + r * kRowBytes + (chunk ^ swizzle) * 16);
  }
}

// Stores slices of a warp's rows through slots of shared memory of its own, in turn: registers go
// to a slot by stmatrix, the copy engine takes it from there while the next slices are written to
// the others. No warp waits for another. Where the expert ends inside the warp's rows, its lanes
// store those that exist.
template <class Shape, int kSlice>
class SliceStore {
 public:
  static constexpr int kRowBytes = kSlice * static_cast<int>(sizeof(typename Shape::Element));
  static constexpr int kSlotBytes = kStoreRows * kRowBytes;
  static constexpr int kWarpBytes = 4096;
  static constexpr int kSlots = kWarpBytes / kSlotBytes;
  static constexpr int kSharedBytes = kWarpgroup / kWarp * kWarpBytes;  // of a consumer
  static_assert(kRowBytes == 128 || kRowBytes == 64, "the swizzles of 128 and 64 bytes");

  __device__ SliceStore(uint32_t shared, int32_t thread)
      : shared_(shared + thread / kWarp * kWarpBytes) {
    // Lane l gives row l % 16 of a store, and the left or right 8 of 16 columns.
    const uint32_t row = thread % kStoreRows * kRowBytes;
    lane_offset_ = row + (thread % kWarp / kStoreRows ^ (row >> 7 & kSwizzleMask)) * 16;
  }

  // Columns [column, column + kSlice) of part `part`; the consumer's rows from `row` on, of which
  // `rows` exist. value(m, j, i) is accumulator 4 j + i of subtile m, counted from the slice's
  // first column; its arguments are constants when unrolled.
  template <class Value>
  __device__ __forceinline__ void store(const Output& out, int32_t row, int32_t rows, int32_t part,
                                        int32_t column, const Value& value) {
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m) {
      const int32_t skipped = m * 64 + warp() * kStoreRows;
      if (rows > skipped)
        store_rows(out, row + skipped, rows - skipped, part, column,
                   [&](int j, int i) { return value(m, j, i); });
    }
  }

  __device__ void finish() const {
    if (lane() == 0) ptx::tma_store_wait();
  }

 private:
  using Element = typename Shape::Element;
  static constexpr int32_t kChunks = kRowBytes / 16;
  static constexpr uint32_t kSwizzleMask = kChunks - 1;

  // Not kept: registers are short in the kernels of 192 accumulators.
  __device__ static int32_t lane() {
    return static_cast<int32_t>(threadIdx.x % kWarp);
  }
  __device__ static int32_t warp() {
    return static_cast<int32_t>(threadIdx.x % kWarpgroup / kWarp);
  }
  __device__ static uint32_t packed(float low, float high) {
    return pack(low, high, Element());
  }

  template <class Value>
  __device__ __forceinline__ void store_rows(const Output& out, int32_t row, int32_t rows,
                                             int32_t part, int32_t column, const Value& value) {
    const uint32_t slot = shared_ + next_slot_ * kSlotBytes;
    next_slot_ = (next_slot_ + 1) % kSlots;
    if (lane() == 0) ptx::tma_store_wait_read<kSlots - 1>();
    __syncwarp();  // nobody reads the slot any more
#pragma unroll
    for (int j = 0; j < kSlice / 8; j += 2)
      ptx::stmatrix_x4((slot + lane_offset_) ^ j * 16, packed(value(j, 0), value(j, 1)),
                       packed(value(j, 2), value(j, 3)), packed(value(j + 1, 0), value(j + 1, 1)),
                       packed(value(j + 1, 2), value(j + 1, 3)));
    ptx::fence_proxy_async();
    __syncwarp();
    send_rows<Element, kSlice>(out, slot, row, rows, part, column);
    if (lane() == 0) ptx::tma_store_commit();  // a group for every slot, even if empty
  }

  uint32_t shared_;       // this warp's slots
  uint32_t lane_offset_;  // of the lane's first 8 columns in a slot; slots are on 1024 bytes
  int32_t next_slot_ = 0;
};

}  // namespace tilemoe::cuda
