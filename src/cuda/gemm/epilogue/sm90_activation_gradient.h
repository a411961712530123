// The epilogue of the activation gradient, which reads H through the ring.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/epilogue/activation_gradient.h"
#include "cuda/gemm/epilogue/sm90_gradient_codes.h"
#include "cuda/gemm/epilogue/sm90_slices_of_H.h"
#include "cuda/gemm/epilogue/sm90_store.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::sm90 {

// From D = dA' and the stored H: A = act(H) again, dH = act'(H) (s dA'), A' = s A and the row sums
// <dA', A> of each 64 columns.
//
// H is loaded through the ring, slice by slice of columns, each in its own stage. A warp walks the
// slices of its 16 rows independently of the other warps:
//
//   producer   H -> stage                                              the next tile's operands
//   warp                  H -> dH in place, A' next to it
//   TMA                                         dH, A' ->
//
// A slice is a group of ds's partial sums, so the order of these sums does not depend on the tile:
// a lane's own columns in ascending order, by fma, then those of lane xor 1, then those of lane xor
// 2.
//
// dH may overwrite H in global memory: a slice is stored after it has landed, and rows past the
// expert's last row are neither read nor stored. H is loaded as two boxes: gate and up columns, or
// the first and last half of interleaved gate/up columns.
//
// Codes: stores dH as codes, too, if the caller requests it (sm90_gradient_codes.h).
template <class Shape, Activations kActivations, class Codes = NoGradientCodes>
class ActivationGradientEpilogue {
 public:
  using Out = typename Shape::Recipe::Out;
  using Element = typename Out::dH;
  static_assert(all_same<Element, typename Out::H, typename Out::AScaled>);
  static constexpr int kParts = kActivations == Activations::kPlain ? 1 : 2;  // of H
  static constexpr int kColumns = Shape::BLOCK_N;
  static constexpr int kSlice = kStoreColumns;
  static constexpr int kSlices = Shape::BLOCK_N / kSlice;
  // 16 columns each; the other activations take more registers.
  static constexpr int kBlocksAtOnce = kActivations == Activations::kSwiGLU ? 2 : 1;
  static constexpr int kRowBytes = kSlice * static_cast<int>(sizeof(Element));
  static constexpr int kPartBytes = Shape::BLOCK_M * kRowBytes;
  using Slice = SliceOfH<kParts, kPartBytes>;
  // A' lies in the slice's stage, after H or dH; if a stage is too small, each slice of A' has its
  // own place.
  static constexpr int kScaledAt = kParts * kPartBytes;
  static constexpr bool kScaledInStage =
      kScaledAt + kPartBytes <= (Shape::BLOCK_M + Shape::BLOCK_N) * kRowBytes;
  static constexpr int kScaledBytes = kPartBytes / kConsumers;
  static constexpr int kSharedBytes = kScaledInStage ? 0 : kSlices * kScaledBytes;
  static_assert(kRowBytes == 128, "the swizzle of 128 bytes");
  static_assert(kSlice == kDsColumns, "a slice is a group of ds");
  static_assert(Shape::kFragments == 1, "a consumer has 64 rows");

  static constexpr bool kMayInterleaveColumns =
      kActivations == Activations::kGated && sizeof(typename Shape::Element) == sizeof(Element);
  // The fp8 recipe: H may be codes. A slice of them, as wide as one of A', is loaded to the place of
  // A' in the stage, and A' may lie over the codes in global memory, too.
  static constexpr bool kMayReadCodes = sizeof(typename Shape::Element) == 1;
  static_assert(!kMayReadCodes || (kScaledInStage && kParts == 2));
  static constexpr bool kWritesCodes = Codes::kWanted;
  static_assert(kMayReadCodes || !kWritesCodes);

  struct ParamsOfValues {
    CUtensorMap H;          // ragged (capacity, kParts, n), or (capacity, 1, 2n) where adjacent
    RaggedOutput dH;        // the same; optional
    RaggedOutput A_scaled;  // (capacity, 1, n); optional
    const float* score;     // (capacity); null: every s is 1
    float* ds_partial;      // (ds_groups(n), capacity); null: not stored
    int64_t capacity;
    int32_t n;
    bool interleaved_columns;  // of H; requires kMayInterleaveColumns
    ActivationParams activation;
  };
  struct ParamsOfCodes : ParamsOfValues, Codes::Params {
    const float* H_scales;  // of codes (core/fp8_rows.h); null: H has values
  };
  using Params = std::conditional_t<kMayReadCodes, ParamsOfCodes, ParamsOfValues>;

  static Params params(const ActivationGradient& step) {
    const tilemoe_experts& experts = *step.experts;
    const bool interleaved_columns = has_interleaved_columns(experts, step.W1);
    const int64_t parts = interleaved_columns ? 1 : kParts, columns = kParts * experts.n / parts;
    Params params{};
    static_cast<ParamsOfValues&>(params) = {
        .H = step.H_codes.given()
                 ? ragged_rows_map<Element>(codes_as_rows(step), 1, experts.n, Shape::BLOCK_M)
                 : ragged_rows_map<Element>(step.H, parts, columns, Shape::BLOCK_M),
        .dH = RaggedStore<Shape, Element>::output(step.dH, parts, columns),
        .A_scaled = RaggedStore<Shape, Element>::output(step.A_scaled, 1, experts.n),
        .score = step.rows.score,
        .ds_partial = step.ds_partial,
        .capacity = step.rows.capacity,
        .n = static_cast<int32_t>(experts.n),
        .interleaved_columns = interleaved_columns,
        .activation = activation_params(experts)};
    if constexpr (kMayReadCodes) {
      static_cast<typename Codes::Params&>(params) = Codes::params(step);
      params.H_scales = step.H_codes.scales;
    }
    return params;
  }
  // Codes of gate and up have the bytes of A': (capacity, n).
  static tilemoe_tensor codes_as_rows(const ActivationGradient& step) {
    const int64_t n = step.experts->n;
    TILEMOE_ASSERT(kMayReadCodes && n % kFp8HColumns == 0, "codes of H of " << n << " columns");
    return {.data = step.H_codes.codes,
            .dtype = step.experts->dtype,
            .ndim = 2,
            .shape = {step.rows.capacity, n},
            .stride = {n, 1}};
  }
  __device__ static bool reads_codes(const Params& params) {
    if constexpr (kMayReadCodes) return params.H_scales != nullptr;
    return false;
  }

  // Loads slices of H: (kParts, BLOCK_M, kSlice), or of codes (BLOCK_M, 128).
  class Load {
   public:
    static constexpr int kBlocks = kSlices;
    static constexpr int kTmaBytes = kParts * kPartBytes;
    static constexpr int kBlockBytes = kScaledAt + (kScaledInStage ? kPartBytes : 0);

    __device__ explicit Load(const Params& params) : params_(params) {}
    __device__ int32_t tma_bytes() const { return reads_codes(params_) ? kPartBytes : kTmaBytes; }

    __device__ void prefetch() const { ptx::tma_prefetch_map(&params_.H); }
    __device__ void begin(const Tile& tile) {
      row_ = ptx::uniform(tile.row_begin);
      row_end_ = ptx::uniform(tile.row_end);
      column_ = ptx::uniform(tile.n_block) * Shape::BLOCK_N;
    }
    __device__ void load(uint32_t shared, uint32_t full, int32_t slice) const {
      if (reads_codes(params_)) {
        ptx::tma_load(shared + kScaledAt, &params_.H, full, column_ + slice * kSlice,
                      kRaggedRows - row_end_ + row_, row_end_, kRaggedRows, 0);
        return;
      }
#pragma unroll
      for (int box = 0; box < kParts; ++box) {
        const Place place = place_of(params_, box, column_ + slice * kSlice);
        ptx::tma_load(shared + box * kPartBytes, &params_.H, full, place.column,
                      kRaggedRows - row_end_ + row_, row_end_, kRaggedRows, place.part);
      }
    }

   private:
    const Params& params_;
    int32_t row_, row_end_, column_;
  };

  __device__ ActivationGradientEpilogue(const Params& params, uint32_t shared, int32_t /*thread*/)
      : params_(params), shared_(shared) {}

  // Loads the scores of this lane's rows, before the tile's MMAs.
  __device__ void begin(const Tile& tile, int32_t row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = row + warp() * kStoreRows + lane() / 4 + 8 * half;
      s_[half] = params_.score != nullptr && r < tile.row_end ? params_.score[r] : 1.f;
    }
  }

  // Processes the consumer's rows, from `row` on, of every slice.
  template <class Blocks>
  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row,
                                        Blocks slices) const {
    with_activation<kActivations>(params_.activation, [&](const auto& f) {
      finish_rows(f, D[0], tile, row + warp() * kStoreRows, slices);
    });
  }

  // Waits until TMA has read the last slice's stage.
  __device__ void wait_for_stores() const {
    if (lane() == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
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

  __device__ static bool interleaved_columns(const Params& params) {
    return kMayInterleaveColumns && params.interleaved_columns;
  }
  // The position of a slice's box number `box` in H.
  struct Place {
    int32_t part, column;
  };
  __device__ static Place place_of(const Params& params, int32_t box, int32_t column) {
    return interleaved_columns(params) ? Place{0, 2 * column + box * kSlice} : Place{box, column};
  }

  // Processes the warp's 16 rows from `row` on, those before the expert's end.
  template <class Function, class Blocks>
  __device__ __forceinline__ void finish_rows(const Function& f,
                                              const float (&dA)[Shape::BLOCK_N / 2],
                                              const Tile& tile, int32_t row, Blocks& slices) const {
    const int32_t first_column = ptx::uniform(tile.n_block * Shape::BLOCK_N);
    const int32_t row_end = ptx::uniform(tile.row_end);
    row = ptx::uniform(row);
    ScalesOfH scales;
    typename Codes::Maxima maxima;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice % 2 == 0) maxima = {};
      const int32_t column = first_column + slice * kSlice;
      if constexpr (kMayReadCodes)
        if (reads_codes(params_) && slice * kSlice % kFp8Tile == 0 && column < params_.n)
          scales.read(params_.H_scales, params_.n, row, row_end, column);
      const uint32_t warp_part = ptx::uniform(slices.wait() + (row - tile.row_begin) * kRowBytes);
      const uint32_t scaled_part = scaled_part_of(warp_part, slice);
      if (row < tile.row_end && column < params_.n) {
        float ds[2] = {0.f, 0.f};
        differentiate(f, warp_part, scaled_part, &dA[slice * (kSlice / 2)], ds, scales, maxima);
        const float sum = ds_of_row(ds);  // overlaps with the slice's last stores
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane() == 0) send(warp_part, scaled_part, row, row_end, column);
        store_sum(sum, row, row_end, column / kSlice);
      }
      if (lane() == 0) ptx::tma_store_commit();
      if constexpr (kWritesCodes) store_codes(slices, maxima, slice, warp_part, row, tile, column);
      if (slice > 0) {
        if (lane() == 0) ptx::tma_store_wait_read<1>();
        __syncwarp();
        slices.release_previous();
      }
      slices.advance();
    }
  }

  // Stores the codes of a group of two slices, of which the second one is at `warp_part`.
  template <class Blocks>
  __device__ __forceinline__ void store_codes(const Blocks& slices,
                                              const typename Codes::Maxima& maxima, int slice,
                                              uint32_t warp_part, int32_t row, const Tile& tile,
                                              int32_t column) const {
    const uint32_t first_part =
        ptx::uniform(slices.previous() + (row - tile.row_begin) * kRowBytes);
    const int32_t row_end = ptx::uniform(tile.row_end);
    if (slice % 2 == 1 && row < row_end && column - kSlice < params_.n)
      Codes::store(params_, maxima, first_part, warp_part, column < params_.n ? 2 : 1, row, row_end,
                   column - kSlice);
  }

  // The address of the warp's A' of the slice whose H or dH is at `warp_part`.
  __device__ uint32_t scaled_part_of(uint32_t warp_part, int slice) const {
    if constexpr (kScaledInStage)
      return warp_part + kScaledAt;
    else
      return ptx::uniform(shared_ + slice * kScaledBytes + warp() * kStoreRows * kRowBytes);
  }

  // Processes a slice of the warp's rows in blocks of 16 columns of 16-bit numbers.
  template <class Function>
  __device__ __forceinline__ void differentiate(const Function& f, uint32_t warp_part,
                                                uint32_t scaled_part, const float* dA,
                                                float (&ds)[2], const ScalesOfH& scales,
                                                typename Codes::Maxima& maxima) const {
    const Slice slice(warp_part, interleaved_columns(params_));
    const SliceOfCodes codes(scaled_part);
#pragma unroll
    for (int first = 0; first < kSlice / 16; first += kBlocksAtOnce) {
      PackedBlock gate[kBlocksAtOnce], up[kBlocksAtOnce] = {}, A_scaled[kBlocksAtOnce];
#pragma unroll
      for (int b = 0; b < kBlocksAtOnce; ++b)
        load_block(slice, codes, scales, first + b, gate[b], up[b]);
#pragma unroll
      for (int b = 0; b < kBlocksAtOnce; ++b)
        differentiate_block<Element, kActivations>(f, gate[b], up[b], A_scaled[b],
                                                   &dA[8 * (first + b)], s_, ds);
#pragma unroll
      for (int b = 0; b < kBlocksAtOnce; ++b) {
        maxima.add(0, gate[b]);
        maxima.add(1, up[b]);
        slice.store(first + b, gate[b], up[b]);
        slice.store_at_offset(first + b, scaled_part - warp_part, A_scaled[b]);
      }
    }
  }

  template <class Slice>
  __device__ __forceinline__ void load_block(const Slice& slice, const SliceOfCodes& codes,
                                             const ScalesOfH& scales, int block, PackedBlock& gate,
                                             PackedBlock& up) const {
    if constexpr (kMayReadCodes)
      if (reads_codes(params_)) return codes.load(block, scales, gate, up, Element());
    slice.load(block, gate, up);
  }

  // One lane starts the TMA stores of the warp's part of a slice.
  __device__ void send(uint32_t warp_part, uint32_t scaled_part, int32_t row, int32_t row_end,
                       int32_t column) const {
    const auto to = [&](const RaggedOutput& out, uint32_t from, Place place) {
      if (out.columns == 0) return;
      ptx::tma_store(&out.map, from, place.column, kRaggedRows - row_end + row, row_end,
                     kRaggedRows, place.part);
    };
#pragma unroll
    for (int box = 0; box < kParts; ++box)
      to(params_.dH, warp_part + box * kPartBytes, place_of(params_, box, column));
    to(params_.A_scaled, scaled_part, {0, column});
  }

  __device__ void store_sum(float sum, int32_t row, int32_t row_end, int32_t group) const {
    const int32_t r = row + fragment::row(lane() % 2);
    if (lane() % 4 < 2 && r < row_end && params_.ds_partial != nullptr)
      params_.ds_partial[group * params_.capacity + r] = sum;
  }

  const Params& params_;
  uint32_t shared_;  // this consumer's
  float s_[2];       // scores of this lane's rows
};

}  // namespace tilemoe::cuda::sm90
