// Stores rows of few columns up to an end that may be known on the device only: each thread writes
// two numbers at a time, 4 bytes, as it has them.
#pragma once

#include <cstdint>

#include "cuda/core/pack.h"
#include "cuda/core/slab.h"
#include "cuda/epilogue/store_threads.h"

namespace tilemoe::cuda {

// A SlabStore (epilogue/store.h) where a warp's columns are fewer than StoreByThreads takes.
template <class Shape>
class StoreByWords {
 public:
  using Element = typename Shape::Out;
  static constexpr int kBatchColumns = 8;
  static constexpr int kSharedBytes = 0;

  using Output = typename StoreByThreads<Shape, 32>::Output;
  static Output output(const tilemoe_tensor& out, int64_t parts, int64_t columns) {
    return StoreByThreads<Shape, 32>::output(out, parts, columns);
  }

  __device__ StoreByWords(uint32_t /*shared*/, int32_t /*thread*/) {}

  template <class Value>
  __device__ __forceinline__ void store(const Output& out, int m, int32_t row, int32_t row_end,
                                        int32_t part, int32_t column, const Value& value) const {
    const uint32_t words[1][2] = {
        {pack(value(0, 0), value(0, 1), Element()), pack(value(0, 2), value(0, 3), Element())}};
    store_packed(out, m, row, row_end, part, column, words);
  }

  __device__ __forceinline__ void store_packed(const Output& out, int m, int32_t row,
                                               int32_t row_end, int32_t part, int32_t column,
                                               const uint32_t (*words)[2]) const {
    if (column >= out.columns) return;
    Element* const place = out.data + part * out.part_stride + column + slab::column();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = row + Shape::slab_row(m) + slab::row(half);
      if (r < row_end) *reinterpret_cast<uint32_t*>(place + r * out.row_stride) = words[0][half];
    }
  }

  __device__ void finish() const {}
};

}  // namespace tilemoe::cuda
