// The stores of rows that epilogues use: the concept, and the two implementations by threads, for
// every arch. (sm90 has its own by TMA.)
#pragma once

#include <concepts>
#include <cstdint>

#include "core/check.h"
#include "cuda/core/fragment.h"
#include "cuda/core/recipe.h"
#include "cuda/ptx/warp.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

// Rounds fragments and stores them as rows, up to an expert's last row, which only the device
// knows. A warp calls it for its own fragments; every thread of the warp constructs it.
//   Output    a matrix (rows, parts, columns), as a kernel parameter: output() makes it from a
//             tensor (rows, parts * columns); from an absent tensor, a matrix without columns
//   store()   stores kBatchColumns columns of the warp's fragment m, from `column` of part `part`
//             on, in rows from row + Shape::fragment_row(m) on; not at or past row_end or the part's
//             last column. value(j, i) is the lane's number 4 j + i, counted from the batch's
//             first column; its arguments are constants when unrolled
//   store_packed()  the same of rounded numbers: words[j][half] has 4 j + 2 half and the next
//   finish()        called before the thread ends
// `shared` has kSharedBytes for the group of threads that `thread` counts, which contains the warp.
template <class S>
concept FragmentStore = requires(const S store, const tilemoe_tensor& tensor, int64_t size,
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

// Stores the first kColumns columns of a warp's fragment m in batches; number(i) is the lane's
// number i.
template <int kColumns, FragmentStore Store, class Number>
__device__ __forceinline__ void store_fragment(const Store& rows, const typename Store::Output& out,
                                               int m, int32_t row, int32_t row_end, int32_t part,
                                               int32_t column, const Number& number) {
  constexpr int kBatch = Store::kBatchColumns;
  static_assert(kColumns % kBatch == 0);
#pragma unroll
  for (int first = 0; first < kColumns; first += kBatch)
    rows.store(out, m, row, row_end, part, column + first,
               [&](int j, int i) { return number(first / 2 + 4 * j + i); });
}

// The same for all of a warp's fragments; number(m, i) is the lane's number i in fragment m.
template <class Shape, int kColumns, FragmentStore Store, class Number>
__device__ __forceinline__ void store_columns(const Store& rows, const typename Store::Output& out,
                                              int32_t row, int32_t row_end, int32_t part,
                                              int32_t column, const Number& number) {
#pragma unroll
  for (int m = 0; m < Shape::kFragments; ++m)
    store_fragment<kColumns>(rows, out, m, row, row_end, part, column,
                             [&](int i) { return number(m, i); });
}

// A 4x4 transposition: lane q of the four that share a row has word q of four groups of 8 columns,
// and receives the four words of group q, which are 16 contiguous bytes.
__device__ __forceinline__ uint4 words_of_group(const uint32_t (&group)[4], int32_t lane) {
  const bool odd = lane & 1, upper = lane & 2;
  // The neighbours' words of groups 0 and 1, 2 and 3: [i] is word 2 (lane / 2) + i of either group.
  uint32_t pair[2][2];
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const uint32_t left = group[2 * p], right = group[2 * p + 1];
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? left : right, 1);
    pair[p][0] = odd ? other : left;
    pair[p][1] = odd ? right : other;
  }
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? pair[0][i] : pair[1][i], 2);
    word[i] = upper ? other : pair[0][i];
    word[2 + i] = upper ? pair[1][i] : other;
  }
  return {word[0], word[1], word[2], word[3]};
}

// The same of words with 4 codes, two of each 8 of 16 columns: 16 codes in the order of their columns.
__device__ __forceinline__ uint4 codes_in_order(const uint4& group) {
  return {__byte_perm(group.x, group.y, 0x5410), __byte_perm(group.z, group.w, 0x5410),
          __byte_perm(group.x, group.y, 0x7632), __byte_perm(group.z, group.w, 0x7632)};
}

// A FragmentStore of 16-bit numbers: each thread writes 16 bytes at a time from its registers. The
// four lanes of a row write 64 contiguous bytes, which are two sectors of L2. By default a batch
// has half of a tile's columns, which are the columns of A with a gated activation.
template <class Shape, class Element_, int kBatch = Shape::BLOCK_N / 2>
class StoreByThreads {
 public:
  using Element = Element_;
  static constexpr int kGroup = 8;  // columns a lane writes: 16 bytes
  static constexpr int kBatchColumns = kBatch;
  static constexpr int kSharedBytes = 0;
  static_assert(kGroup * sizeof(Element) == sizeof(uint4) && kBatch % (4 * kGroup) == 0);

  struct Output {
    Element* data;
    int64_t row_stride, part_stride;  // in elements; multiples of kGroup
    int32_t columns;                  // of one part, a multiple of kGroup; 0: absent
  };
  static Output output(const tilemoe_tensor& out, int64_t parts, int64_t columns) {
    if (!present(out)) return {};
    TILEMOE_ASSERT(columns % kGroup == 0 && (out.shape[0] == 1 || out.stride[0] % kGroup == 0) &&
                       parts * columns <= out.shape[1] && kDTypeOf<Element> == out.dtype &&
                       reinterpret_cast<uintptr_t>(out.data) % sizeof(uint4) == 0,
                   "stores of 16 bytes into " << parts << " parts of " << columns
                                              << " columns of rows " << out.stride[0]
                                              << " apart, at " << out.data);
    return {.data = static_cast<Element*>(out.data),
            .row_stride = out.stride[0],
            .part_stride = columns,
            .columns = static_cast<int32_t>(columns)};
  }

  __device__ StoreByThreads(uint32_t /*shared*/, int32_t /*thread*/) {}

  template <class Value>
  __device__ __forceinline__ void store(const Output& out, int m, int32_t row, int32_t row_end,
                                        int32_t part, int32_t column, const Value& value) const {
    uint32_t words[kBatchColumns / 8][2];
#pragma unroll
    for (int j = 0; j < kBatchColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        words[j][half] = pack(value(j, 2 * half), value(j, 2 * half + 1), Element());
    store_packed(out, m, row, row_end, part, column, words);
  }

  __device__ __forceinline__ void store_packed(const Output& out, int m, int32_t row,
                                               int32_t row_end, int32_t part, int32_t column,
                                               const uint32_t (*words)[2]) const {
    // Read again: with threadIdx, sm90's kernels with deferred stores, which hold words during the
    // next MMAs, spilled five times as much.
    const int32_t thread = ptx::thread_index(), lane = thread % kWarp;
    row += Shape::fragment_row(m, thread);
    if (row >= row_end || column >= out.columns) return;  // the whole warp, which shuffles
    row += lane / 4;
    column += lane % 4 * kGroup;
    Element* const place = out.data + part * out.part_stride + column;
#pragma unroll
    for (int first = 0; first < kBatch; first += 4 * kGroup)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t(*const w)[2] = words + first / 8;
        const uint4 group = words_of_group({w[0][half], w[1][half], w[2][half], w[3][half]}, lane);
        const int32_t r = row + half * fragment::kRows / 2;
        if (r < row_end && column + first < out.columns)
          *reinterpret_cast<uint4*>(place + r * out.row_stride + first) = group;
      }
  }

  __device__ void finish() const {}
};

// A FragmentStore for warps with fewer columns than StoreByThreads takes: each thread writes two
// numbers, 4 bytes, at a time.
template <class Shape, class Element_>
class StoreByWords {
 public:
  using Element = Element_;
  static constexpr int kBatchColumns = 8;
  static constexpr int kSharedBytes = 0;

  using Output = typename StoreByThreads<Shape, Element, 32>::Output;
  static Output output(const tilemoe_tensor& out, int64_t parts, int64_t columns) {
    return StoreByThreads<Shape, Element, 32>::output(out, parts, columns);
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
    Element* const place = out.data + part * out.part_stride + column + fragment::column();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = row + Shape::fragment_row(m) + fragment::row(half);
      if (r < row_end) *reinterpret_cast<uint32_t*>(place + r * out.row_stride) = words[0][half];
    }
  }

  __device__ void finish() const {}
};

}  // namespace tilemoe::cuda
