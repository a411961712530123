// The activation gradient's end: from D = dA' and the stored H, A = act(H) again, dH = act'(H) (s
// dA'), A' = s A and the row sums <dA', A> of this tile's columns.
//
// A warp walks its 16 rows slice by slice of columns, through slots of shared memory of its own:
//
//   copy engine   H -> slot                     dH slot, A' slot ->       next H -> slot
//   warp                     H -> dH in place, A'
//
// The first slices are on their way before the tile's products begin. dH may lie over H: a slice is
// stored after it has landed, and no other warp reads what is stored. H comes as two boxes: gate
// and up columns, or where these are adjacent, the first and the last half of both.
#pragma once

#include <cstdint>

#include "cuda/epilogue/activation_slopes.h"
#include "cuda/epilogue/output.h"
#include "cuda/gemm/ring.h"
#include "cuda/gemm/shape.h"
#include "cuda/gemm/tile.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/vector_copy.h"

namespace tilemoe::cuda {

template <class Shape, Activations kActivations>
class ActivationGradientEpilogue {
 public:
  using Element = typename Shape::Element;
  static constexpr int kParts = kActivations == Activations::kPlain ? 1 : 2;  // of H
  static constexpr int kSlice = 32;
  // 16 columns each; the other activations take more registers.
  static constexpr int kBlocksAtOnce = kActivations == Activations::kSwiGLU ? 2 : 1;
  static constexpr int kSlots = 3;        // of H: one computed, one stored, one loaded
  static constexpr int kScaledSlots = 2;  // of A': one computed, one stored
  static constexpr int kRowBytes = kSlice * static_cast<int>(sizeof(Element));
  static constexpr int kPartBytes = kStoreRows * kRowBytes;
  static constexpr int kSlotBytes = kParts * kPartBytes;  // H or dH
  static constexpr int kScaledAt = kSlots * kSlotBytes;
  static constexpr int kWarpBytes = kScaledAt + kScaledSlots * kPartBytes;
  static constexpr int kWarps = kWarpgroup / kWarp;
  static constexpr int kBarriersAt = kWarps * kWarpBytes;
  static constexpr int kSharedBytes =
      (kBarriersAt + kWarps * kSlots * 8 + kSwizzleAtom - 1) / kSwizzleAtom * kSwizzleAtom;

  static constexpr bool kMayBeAdjacent = kActivations == Activations::kGated;

  struct Params {
    Output H;            // (capacity, kParts, n), or (capacity, 1, 2n) where adjacent; read
    Output dH;           // the same; data null: not wanted
    Output A_scaled;     // (capacity, 1, n); data null: not wanted
    const float* score;  // (capacity); null: every s is 1
    float* ds_partial;   // (column tiles, capacity); null: not wanted
    int64_t capacity;
    int32_t n;
    bool adjacent;  // gate and up of a column of A lie side by side; needs kMayBeAdjacent
    ActivationParams activation;
  };

  __device__ ActivationGradientEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params),
        slots_(shared + thread / kWarp * kWarpBytes),
        barriers_(shared + kBarriersAt + thread / kWarp * kSlots * 8) {
    if (lane() == 0) {
      for (int slot = 0; slot < kSlots; ++slot) ptx::mbarrier_init(barriers_ + 8 * slot, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }

  // Before the tile's products.
  __device__ void begin(const Tile& tile, int32_t row) {
    const int32_t rows = tile.row_end - row - warp() * kStoreRows;
    first_row_ = row + warp() * kStoreRows;
    first_column_ = tile.n_block * Shape::BLOCK_N;
    const int32_t columns = min(params_.n - first_column_, Shape::BLOCK_N);
    slices_ = (columns + kSlice - 1) / kSlice;
    to_load_ = rows <= 0 ? 0 : min((rows + 63) / 64, Shape::kSubtiles) * slices_;
    loading_ = stored_ = 0;
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t r = lane() / 4 + m * 64 + 8 * half;
        s_[m][half] = params_.score != nullptr && r < rows ? params_.score[first_row_ + r] : 1.f;
      }
    if (lane() == 0) ptx::tma_store_wait_read<0>();
    for (int i = 0; i < kSlots; ++i) load_next();
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    const int32_t rows = tile.row_end - row - warp() * kStoreRows;
    if (rows <= 0) return;
    with_activation_slopes<kActivations>(params_.activation, [&](const auto& f) {
    // The code of a subtile once: unrolled, it did not fit the instruction cache.
#pragma unroll 1
      for (int m = 0; m < Shape::kSubtiles && rows > m * 64; ++m) {
        finish_rows(f, D[0], s_[0], first_row_ + m * 64, rows - m * 64, tile.n_block);
        if constexpr (Shape::kSubtiles == 2) {
#pragma unroll
          for (int i = 0; i < Shape::BLOCK_N / 2; ++i) D[0][i] = D[1][i];
#pragma unroll
          for (int half = 0; half < 2; ++half) s_[0][half] = s_[1][half];
        }
      }
    });
  }

  __device__ void finish() const {
    if (lane() == 0) ptx::tma_store_wait();
  }

 private:
  __device__ static int32_t lane() {
    return static_cast<int32_t>(threadIdx.x % kWarp);
  }
  __device__ static int32_t warp() {
    return static_cast<int32_t>(threadIdx.x % kWarpgroup / kWarp);
  }

  __device__ bool adjacent() const {
    return kMayBeAdjacent && params_.adjacent;
  }
  // Where a slice's box number `box` lies in H.
  struct Place {
    int32_t part, column;
  };
  __device__ Place place_of(int32_t box, int32_t column) const {
    return adjacent() ? Place{0, 2 * column + box * kSlice} : Place{box, column};
  }

  // Starts the next slice of H towards the slot after the last one loaded.
  __device__ void load_next() {
    if (loading_ == to_load_) return;
    if (lane() == 0) {
      const int32_t m = loading_ / slices_, slice = loading_ - m * slices_;
      const uint32_t barrier = barriers_ + 8 * load_slot_;
      ptx::mbarrier_arrive_expect_bytes(barrier, kParts * kPartBytes);
#pragma unroll
      for (int box = 0; box < kParts; ++box) {
        const Place place = place_of(box, first_column_ + slice * kSlice);
        ptx::tma_load(slots_ + load_slot_ * kSlotBytes + box * kPartBytes, &params_.H.map, barrier,
                      place.column, place.part, first_row_ + m * 64);
      }
    }
    ++loading_;
    load_slot_ = load_slot_ + 1 == kSlots ? 0 : load_slot_ + 1;
  }

  // The warp's 16 rows from `row` on, of which `rows` exist.
  template <class Function>
  __device__ __forceinline__ void finish_rows(const Function& f,
                                              const float (&dA)[Shape::BLOCK_N / 2],
                                              const float (&s)[2], int32_t row, int32_t rows,
                                              int32_t n_block) {
    float ds[2] = {0.f, 0.f};
#pragma unroll
    for (int slice = 0; slice < Shape::BLOCK_N / kSlice; ++slice) {
      const int32_t column = first_column_ + slice * kSlice;
      if (column >= params_.n) break;
      const uint32_t slot = slots_ + at_.stage * kSlotBytes;
      const uint32_t scaled = slots_ + kScaledAt + slice % kScaledSlots * kPartBytes;
      wait_for(barriers_ + 8 * at_.stage, at_.parity);
      at_.advance();
      differentiate(f, slot, scaled, &dA[slice * (kSlice / 2)], s, ds);
      store_slice(slot, scaled, row, rows, column);
    }
    store_sums(ds, row, rows, n_block);
  }

  // A slice: its 16-bit numbers come and go in blocks of 16 columns.
  template <class Function>
  __device__ __forceinline__ void differentiate(const Function& f, uint32_t slot, uint32_t scaled,
                                                const float* dA, const float (&s)[2],
                                                float (&ds)[2]) const {
    // Lane l gives row l % 16, and the left or right 8 of the 16 columns.
    const uint32_t row = static_cast<uint32_t>(lane()) % kStoreRows * kRowBytes;
    const uint32_t left_or_right = static_cast<uint32_t>(lane()) / kStoreRows;
    const uint32_t place = row + (left_or_right ^ (row >> 7 & (kRowBytes / 16 - 1))) * 16;
#pragma unroll
    for (int first = 0; first < kSlice / 16; first += kBlocksAtOnce) {
      uint32_t gate[kBlocksAtOnce][4], up[kBlocksAtOnce][4] = {}, A_scaled[kBlocksAtOnce][4];
#pragma unroll
      for (int b = 0; b < kBlocksAtOnce; ++b) {
        const uint32_t block = (first + b) * 32;
        if (adjacent()) {
          load_pairs(pairs_of(slot, first + b), gate[b], up[b]);
        } else {
          ptx::ldmatrix_x4(gate[b], (slot + place) ^ block);
          if constexpr (kParts == 2) ptx::ldmatrix_x4(up[b], (slot + kPartBytes + place) ^ block);
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocksAtOnce; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2;
          const float2 g = unpack(gate[b][i], Element()), u = unpack(up[b][i], Element());
          float2 gate_slope, up_slope;
          const float A_low = f(g.x, u.x, gate_slope.x, up_slope.x);
          const float A_high = f(g.y, u.y, gate_slope.y, up_slope.y);
          const float* const dA_pair = &dA[8 * (first + b) + 2 * i];
          ds[half] = fmaf(dA_pair[1], A_high, fmaf(dA_pair[0], A_low, ds[half]));
          const float low = s[half] * dA_pair[0], high = s[half] * dA_pair[1];
          gate[b][i] = pack(gate_slope.x * low, gate_slope.y * high, Element());
          if constexpr (kParts == 2)
            up[b][i] = pack(up_slope.x * low, up_slope.y * high, Element());
          A_scaled[b][i] = pack(s[half] * A_low, s[half] * A_high, Element());
        }
#pragma unroll
      for (int b = 0; b < kBlocksAtOnce; ++b) {
        const uint32_t block = (first + b) * 32;
        if (adjacent()) {
          store_pairs(pairs_of(slot, first + b), gate[b], up[b]);
        } else {
          store_blocks((slot + place) ^ block, gate[b]);
          if constexpr (kParts == 2) store_blocks((slot + kPartBytes + place) ^ block, up[b]);
        }
        store_blocks((scaled + place) ^ block, A_scaled[b]);
      }
    }
  }

  __device__ static void store_blocks(uint32_t place, const uint32_t (&r)[4]) {
    ptx::stmatrix_x4(place, r[0], r[1], r[2], r[3]);
  }

  // Adjacent: a block of 16 columns of A is one box of H. A lane has gate and up of two neighbours,
  // 8 bytes, in four places: of the two halves of the columns, rows l / 4 and l / 4 + 8.
  __device__ static uint32_t pairs_of(uint32_t slot, int block) {
    const auto row = static_cast<uint32_t>(lane()) / 4, pair = static_cast<uint32_t>(lane()) % 4;
    return slot + block * kPartBytes + row * kRowBytes + (pair / 2 ^ (row / 2 & 3)) * 16 +
           pair % 2 * 8;
  }
  __device__ static uint32_t pairs_at(uint32_t pairs, int i) {
    return (pairs ^ i / 2 * 32) + i % 2 * 8 * kRowBytes;
  }
  __device__ static void load_pairs(uint32_t pairs, uint32_t (&gate)[4], uint32_t (&up)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 both = ptx::load_shared_8(pairs_at(pairs, i));
      gate[i] = __byte_perm(both.x, both.y, kLowHalves);
      up[i] = __byte_perm(both.x, both.y, kHighHalves);
    }
  }
  __device__ static void store_pairs(uint32_t pairs, const uint32_t (&gate)[4],
                                     const uint32_t (&up)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::store_shared_8(pairs_at(pairs, i), {__byte_perm(gate[i], up[i], kLowHalves),
                                               __byte_perm(gate[i], up[i], kHighHalves)});
  }

  // Sends the slots off, and has H's before it, which has left by now, loaded again.
  __device__ __forceinline__ void store_slice(uint32_t slot, uint32_t scaled, int32_t row,
                                              int32_t rows, int32_t column) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (params_.dH.data != nullptr)
#pragma unroll
      for (int box = 0; box < kParts; ++box) {
        const Place place = place_of(box, column);
        send_rows<Element, kSlice>(params_.dH, slot + box * kPartBytes, row, rows, place.part,
                                   place.column);
      }
    if (params_.A_scaled.data != nullptr)
      send_rows<Element, kSlice>(params_.A_scaled, scaled, row, rows, 0, column);
    if (lane() == 0) {
      ptx::tma_store_commit();
      ptx::tma_store_wait_read<1>();
    }
    __syncwarp();
    if (stored_++ > 0) load_next();
  }

  // Sums over the four lanes that share a row, in a fixed order.
  __device__ void store_sums(const float (&ds)[2], int32_t row, int32_t rows,
                             int32_t n_block) const {
    if (params_.ds_partial == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = ds[half];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int32_t r = lane() / 4 + 8 * half;
      if (lane() % 4 == 0 && r < rows)
        params_.ds_partial[n_block * params_.capacity + row + r] = sum;
    }
  }

  static constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;  // of two words

  const Params& params_;
  uint32_t slots_, barriers_;  // this warp's
  RingPosition<kSlots> at_;    // the slot to be computed
  int32_t load_slot_ = 0;
  float s_[Shape::kSubtiles][2];  // scores of this lane's rows
  // Of the tile: where the warp begins, how many slices are loaded and are to be, and stored.
  int32_t first_row_, first_column_, slices_, loading_, to_load_, stored_ = 0;
};

}  // namespace tilemoe::cuda
