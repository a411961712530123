// Stores of a consumer's rows by TMA, and the epilogues of the down-projection and the input
// gradient: with deferred stores, which overlap with the MMAs of the next tile, and without, for
// ping-pong, where they overlap with those of the other consumer.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/check.h"
#include "cuda/core/fragment.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm90 {

// A consumer's rows of a tile in 16 bits, in registers: rounded when the tile's MMAs are done,
// stored during the MMAs of the next tile.
template <class Shape, class Element>
struct DeferredTile {
  // [m][j][half] holds accumulators 4 j + 2 half and 4 j + 2 half + 1 of fragment m.
  uint32_t words[Shape::kFragments][Shape::BLOCK_N / 8][2];

  __device__ __forceinline__ void round(const Accumulators<Shape>& D) {
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int j = 0; j < Shape::BLOCK_N / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::pin(words[m][j][half] =
                       pack(D[m][4 * j + 2 * half], D[m][4 * j + 2 * half + 1], Element()));
  }
};

// Ragged stores: the end of the rows, an expert's last row, is known on the device only. A TMA
// store takes 16 rows of a warp and clips the rows past the end.
constexpr int kStoreColumns = kRaggedColumns;  // 128 bytes: as wide as a swizzled row can be
constexpr int kNarrowStoreColumns = 32;        // 64 bytes: two sectors of L2
constexpr int kStoreRows = fragment::kRows;

// A matrix (rows, parts, columns): H has a gate and an up part, so that a box of columns is clipped
// at the end of its part.
struct RaggedOutput {
  CUtensorMap map;  // ragged, boxes of (1, kStoreRows, columns of a slot)
  int32_t columns;  // of one part; 0: not stored
};

// Stores a warp's rows through the warp's own slots of shared memory, a batch of slices of columns
// at a time: stmatrix writes registers to the slots, TMA stores the slots. No warp waits for
// another warp. A fence waits for all stores to shared memory, so each batch has one fence.
template <class Shape, class Element_, int kSlice_ = kStoreColumns, int kMaxSlots = 3>
class RaggedStore {
 public:
  using Element = Element_;
  static constexpr int kSlice = kSlice_;
  static constexpr int kSlices = Shape::BLOCK_N / kSlice;
  // A batch has two or three slices, or, of narrow ones, the columns of A if gated.
  static constexpr int kAtOnce = kSlice < kStoreColumns ? kSlices / 2
                                 : kSlices % 2 == 0     ? 2
                                 : kSlices % 3 == 0     ? 3
                                                        : 1;
  static constexpr int kSlots = kAtOnce < kMaxSlots ? kAtOnce : kMaxSlots;
  static constexpr int kBatchColumns = kSlots * kSlice;
  static constexpr int kRowBytes = kSlice * static_cast<int>(sizeof(Element));
  static constexpr int kSlotBytes = kStoreRows * kRowBytes;
  static constexpr int kWarpBytes = kSlots * kSlotBytes;
  static constexpr int kSharedBytes = kWarpgroup / kWarp * kWarpBytes;  // of a consumer
  static_assert(kRowBytes == 128 || kRowBytes == 64, "as wide as the swizzle");

  using Output = RaggedOutput;
  // `out`: (rows, parts * columns); not stored if absent.
  static Output output(const tilemoe_tensor& out, int64_t parts, int64_t columns) {
    if (!present(out)) return {};
    return {.map = ragged_rows_map<Element>(out, parts, columns, kStoreRows, kSlice),
            .columns = static_cast<int32_t>(columns)};
  }

  __device__ RaggedStore(uint32_t shared, int32_t thread) {
    // Lane l addresses row l % 16 of a store, and the left or right 8 of 16 columns.
    const uint32_t row = thread % kStoreRows * kRowBytes;
    place_ = shared + thread / kWarp * kWarpBytes + row +
             (thread % kWarp / kStoreRows ^ (row >> 7 & (kRowBytes / 16 - 1))) * 16;
  }

  template <class Value>
  __device__ __forceinline__ void store(const RaggedOutput& out, int m, int32_t row,
                                        int32_t row_end, int32_t part, int32_t column,
                                        const Value& value) const {
    // Rounds while TMA still reads the previous batch from the slots.
    uint32_t words[kBatchColumns / 8][2];
#pragma unroll
    for (int j = 0; j < kBatchColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::pin(words[j][half] = packed(value(j, 2 * half), value(j, 2 * half + 1)));
    store_packed(out, m, row, row_end, part, column, words);
  }

  __device__ __forceinline__ void store_packed(const RaggedOutput& out, int m, int32_t row,
                                               int32_t row_end, int32_t part, int32_t column,
                                               const uint32_t (*words)[2]) const {
    const int32_t thread = ptx::thread_index();
    row = ptx::uniform(row + Shape::fragment_row(m, thread));
    row_end = ptx::uniform(row_end);
    column = ptx::uniform(column);
    const uint32_t slots = ptx::uniform(place_);
    if (row >= row_end || column >= out.columns) return;
    const bool first_lane = thread % kWarp == 0;
    if (first_lane) ptx::tma_store_wait_read<0>();
    __syncwarp();  // TMA has read the slots
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
#pragma unroll
      for (int b = 0; b < kSlice / 8; b += 2) {
        const int j = slot * (kSlice / 8) + b;
        ptx::stmatrix_x4((place_ + slot * kSlotBytes) ^ b * 16, words[j][0], words[j][1],
                         words[j + 1][0], words[j + 1][1]);
      }
    ptx::fence_proxy_async();
    __syncwarp();
    if (!first_lane) return;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
      if (column + slot * kSlice < out.columns)
        ptx::tma_store(&out.map, slots + slot * kSlotBytes, column + slot * kSlice,
                       kRaggedRows - row_end + row, row_end, kRaggedRows, part);
    ptx::tma_store_commit();
  }

  __device__ void finish() const {
    if (threadIdx.x % kWarp == 0) ptx::tma_store_wait();
  }

 private:
  __device__ static uint32_t packed(float low, float high) {
    return pack(low, high, Element());
  }

  // Address of the lane's first 8 columns in the first slot; in lane 0, of the slot. Slots are
  // aligned to 1024 bytes.
  uint32_t place_;
};

// The sizes and the output of D + bias.
template <class Shape, FragmentStore Rows>
struct StoredSum {
  static constexpr int kColumns = Shape::BLOCK_N;
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    typename Rows::Output D;  // (capacity, 1, columns)
    Bias bias;
  };

  // `bias`: (E, columns), may be absent.
  static Params params(const tilemoe_tensor& D, const tilemoe_tensor& bias) {
    return {.D = Rows::output(D, 1, D.shape[1]), .bias = bias_of(bias)};
  }
};

// D + bias, rounded; the stores are deferred.
template <class Shape, FragmentStore Rows>
class StoreEpilogue : public StoredSum<Shape, Rows> {
 public:
  using Params = typename StoredSum<Shape, Rows>::Params;
  static_assert(Shape::BLOCK_N % Rows::kBatchColumns == 0);

  __device__ StoreEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  static constexpr int kBatches = Shape::BLOCK_N / Rows::kBatchColumns;

  __device__ __forceinline__ void defer(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    row_ = row;
    row_end_ = tile.row_end;
    column_ = tile.n_block * Shape::BLOCK_N;
    if (row_ >= row_end_) return;
    add_bias<typename Shape::Element, 0, Shape::BLOCK_N>(params_.bias, tile.expert, column_, D);
    deferred_.round(D);
  }

  __device__ __forceinline__ void store_deferred(int32_t batch) {
    if (row_ >= row_end_) return;
#pragma unroll
    for (int i = 0; i < kBatches; ++i)
      if (i == batch)  // registers have constant numbers
#pragma unroll
        for (int m = 0; m < Shape::kFragments; ++m)
          rows_.store_packed(params_.D, m, row_, row_end_, 0, column_ + i * Rows::kBatchColumns,
                             &deferred_.words[m][i * Rows::kBatchColumns / 8]);
  }

  __device__ void finish() const {
    rows_.finish();
  }

 private:
  const Params& params_;
  Rows rows_;
  DeferredTile<Shape, typename Rows::Element> deferred_;
  int32_t row_ = 0, row_end_ = 0, column_;  // of the deferred tile; no rows: none
};

// The same without deferred stores, which hold a rounded tile in registers: next to the
// accumulators of 128x192, 544 bytes are spilled.
template <class Shape, FragmentStore Rows>
class PromptStoreEpilogue : public StoredSum<Shape, Rows> {
 public:
  using Params = typename StoredSum<Shape, Rows>::Params;
  static constexpr int kColumns = Shape::BLOCK_N;

  __device__ PromptStoreEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile,
                                        int32_t row) const {
    if (row >= tile.row_end) return;
    const int32_t column = tile.n_block * kColumns;
    add_bias<typename Rows::Element, 0, kColumns>(params_.bias, tile.expert, column, D);
    store_columns<Shape, kColumns>(rows_, params_.D, row, tile.row_end, 0, column,
                                   [&](int m, int i) { return D[m][i]; });
  }
  __device__ void finish() const { rows_.finish(); }

 private:
  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda::sm90
