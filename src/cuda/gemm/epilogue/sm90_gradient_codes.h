// dH as codes, in the epilogue of the fp8 recipe's activation gradient.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/fp8.h"
#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/activation_gradient.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm90 {

// An activation gradient that writes no codes.
struct NoGradientCodes {
  struct Params {};
  static Params params(const ActivationGradient& /*step*/) { return {}; }
  static constexpr bool kWanted = false;
};

// Codes of a warp's 16 rows of dH, in groups of two slices of 64 columns, which have a scale per row
// and part. A group is quantised when its second slice is finished: from the rounded words of both,
// which are still in their stages. The loops are not unrolled: next to the accumulators of the
// slices that are left that spilled up to 576 bytes.
template <class Slice, class Element>
class GradientCodes {
 public:
  static constexpr bool kWanted = true;
  static constexpr int kSliceColumns = 64;
  static_assert(kFp8Tile == 2 * kSliceColumns);

  struct Params {
    uint8_t* codes;                 // (2, capacity, n); null: not stored
    float* scales;                  // (2, capacity, scale_stride)
    int64_t rows;                   // capacity
    int32_t columns, scale_stride;  // n; k blocks
    float largest;
    bool power_of_two;
  };

  static Params params(const ActivationGradient& step) {
    const tilemoe_experts& experts = *step.experts;
    return {.codes = step.dH_codes.codes,
            .scales = step.dH_codes.scales,
            .rows = step.rows.capacity,
            .columns = static_cast<int32_t>(experts.n),
            .scale_stride = static_cast<int32_t>(blocks_of(experts.n, kFp8Tile)),
            .largest = largest_of(experts.dtype),
            .power_of_two = experts.float_scales == 0};
  }

  // Stores the group of one or two slices at `first` and `second` in shared memory, from `row` and
  // `column` on. All lanes of a warp call it, after they have written the slices.
  __device__ __forceinline__ static void store(const Params& params, uint32_t first,
                                               uint32_t second, int32_t slices, int32_t row,
                                               int32_t row_end, int32_t column) {
    if (params.codes == nullptr) return;
    // Not threadIdx: addresses computed once for all groups would be spilled.
    const int32_t lane = ptx::thread_index() % kWarp;
#pragma unroll 1
    for (int32_t part = 0; part < 2; ++part) {
      uint32_t largest[2] = {0, 0};  // magnitudes of a lane's even and odd columns, by half
#pragma unroll 1
      for (int32_t number = 0; number < slices; ++number) {
        const Slice slice(number == 0 ? first : second, false, lane);
#pragma unroll
        for (int block = 0; block < kSliceColumns / 16; ++block) {
          PackedBlock dH;
          slice.load_part(block, part, dH);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            largest[i % 2] = ptx::max_magnitude(largest[i % 2], dH[i], Element());
        }
      }
      float factor[2];
      const int64_t part_row = part * params.rows + row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[half] = factor_of(params, largest[half]);
        if (lane % 4 == 0 && row + row_of(lane, half) < row_end)
          params.scales[(part_row + row_of(lane, half)) * params.scale_stride + column / kFp8Tile] =
              1.f / factor[half];
      }
#pragma unroll 1
      for (int32_t number = 0; number < slices; ++number)
        store_slice(params, Slice(number == 0 ? first : second, false, lane), lane, part, factor,
                    row, row_end, column + number * kSliceColumns);
    }
  }

 private:
  __device__ static int32_t row_of(int32_t lane, int half) {
    return lane / 4 + 8 * half;
  }

  // The factor of a row, whose four lanes have the maxima of their columns.
  __device__ __forceinline__ static float factor_of(const Params& params, uint32_t largest) {
    constexpr uint32_t kAllLanes = 0xffffffff;
    const float2 two = unpack(largest, Element());
    float amax = fmaxf(two.x, two.y);
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
    return fp8_factor(amax, params.largest, params.power_of_two);
  }

  __device__ __forceinline__ static void store_slice(const Params& params, const Slice& slice,
                                                     int32_t lane, int32_t part,
                                                     const float (&factor)[2], int32_t row,
                                                     int32_t row_end, int32_t column) {
    // A word is the lane's codes of 16 columns: two of the first eight, two of the others.
    uint32_t word[2][4];
#pragma unroll
    for (int block = 0; block < kSliceColumns / 16; ++block) {
      PackedBlock dH;
      slice.load_part(block, part, dH);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        word[half][block] = codes_of(dH[half], factor[half]) | codes_of(dH[2 + half], factor[half])
                                                                   << 16;
    }
    const int32_t to = column + lane % 4 * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 codes = codes_in_order(words_of_group(word[half], lane));
      const int32_t r = row + row_of(lane, half);
      if (r < row_end && to < params.columns)
        *reinterpret_cast<uint4*>(params.codes + (part * params.rows + r) * params.columns + to) =
            codes;
    }
  }
  __device__ static uint32_t codes_of(uint32_t two, float factor) {
    const float2 dH = unpack(two, Element());
    return ptx::float_to_e4m3(dH.x * factor, dH.y * factor);
  }
};

}  // namespace tilemoe::cuda::sm90
