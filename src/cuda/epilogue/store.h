// What the epilogues ask of a store of rows: a kit's own, or epilogue/store_threads.h's.
#pragma once

#include <concepts>
#include <cstdint>

#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

// Rounds slabs and stores them as rows, up to an end that may be known on the device only, an
// expert's last. A warp calls it for its own slabs; constructed by every thread that does.
//   Output    a matrix (rows, parts, columns), as a kernel's parameter: output() makes it of a
//             tensor (rows, parts * columns), and of an absent one a matrix of no columns
//   store()   kBatchColumns columns of the warp's slab m, from `column` of part `part` on, of rows
//             that begin at row + Shape::slab_row(m). What is at or past row_end or the part's last
//             column is left out. value(j, i) is the lane's number 4 j + i, counted from the
//             batch's first column; its arguments are constants when unrolled
//   store_packed()  the same of what is rounded: words[j][half] has 4 j + 2 half and the next
//   finish()        before the thread ends
// `shared` has kSharedBytes for the threads that `thread` counts, of which the warp is one.
template <class S>
concept SlabStore = requires(const S store, const tilemoe_tensor& tensor, int64_t size,
                             const typename S::Output& out, int m, int32_t at, uint32_t shared,
                             float (*value)(int j, int i), const uint32_t (*words)[2]) {
  { S::kBatchColumns } -> std::convertible_to<int>;
  { S::kSharedBytes } -> std::convertible_to<int>;
  { S::output(tensor, size, size) } -> std::same_as<typename S::Output>;
  S(shared, at);
  store.store(out, m, at, at, at, at, value);
  store.store_packed(out, m, at, at, at, at, words);
  store.finish();
};

// The first kColumns columns of a warp's slab m, batch by batch; number(i) is the lane's number i.
template <int kColumns, SlabStore Store, class Number>
__device__ __forceinline__ void store_slab(const Store& rows, const typename Store::Output& out,
                                           int m, int32_t row, int32_t row_end, int32_t part,
                                           int32_t column, const Number& number) {
  constexpr int kBatch = Store::kBatchColumns;
  static_assert(kColumns % kBatch == 0);
#pragma unroll
  for (int first = 0; first < kColumns; first += kBatch)
    rows.store(out, m, row, row_end, part, column + first,
               [&](int j, int i) { return number(first / 2 + 4 * j + i); });
}

// The same of all of a warp's slabs; number(m, i) is the lane's number i in slab m.
template <class Shape, int kColumns, SlabStore Store, class Number>
__device__ __forceinline__ void store_columns(const Store& rows, const typename Store::Output& out,
                                              int32_t row, int32_t row_end, int32_t part,
                                              int32_t column, const Number& number) {
#pragma unroll
  for (int m = 0; m < Shape::kSlabs; ++m)
    store_slab<kColumns>(rows, out, m, row, row_end, part, column,
                         [&](int i) { return number(m, i); });
}

}  // namespace tilemoe::cuda
