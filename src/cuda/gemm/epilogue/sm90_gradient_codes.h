// dH as codes, in the epilogue of the fp8 recipe's activation gradient.
#pragma once

#include <cstdint>

#include "core/fp8.h"
#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/activation_gradient.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm90 {

// An activation gradient that writes no codes.
struct NoGradientCodes {
  struct Params {};
  static Params params(const ActivationGradient& /*step*/) { return {}; }
  static constexpr bool kWanted = false;
  struct Maxima {
    __device__ void add(int /*part*/, const PackedBlock& /*dH*/) {}
  };
};

// Codes of a warp's 16 rows of dH, in groups of two slices of 64 columns, which have a scale per row
// and part. The maxima are taken from the rounded words in registers. When the group's second slice
// is finished, the codes are made from both slices, which are still in their stages: a lane reads
// 16 columns of a row, which are the 16 codes that it writes.
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

  // A lane's maxima of a group: magnitudes of its even and odd columns, with any signs.
  struct Maxima {
    uint32_t of[2][2] = {};  // part, half

    __device__ __forceinline__ void add(int part, const PackedBlock& dH) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        of[part][i % 2] = ptx::max_magnitude(of[part][i % 2], dH[i], Element());
    }
  };

  // Stores the group of one or two slices at `first` and `second` in shared memory, from `row` and
  // `column` on. All lanes of a warp call it, after they have written the slices.
  __device__ __forceinline__ static void store(const Params& params, const Maxima& maxima,
                                               uint32_t first, uint32_t second, int32_t slices,
                                               int32_t row, int32_t row_end, int32_t column) {
    if (params.codes == nullptr) return;
    // Not threadIdx: addresses computed once for all groups would be spilled.
    const uint32_t lane = static_cast<uint32_t>(ptx::thread_index()) % kWarp;
    row += static_cast<int32_t>(lane / 4);
    // Lane q of a row's four has the factor of part q / 2, half q % 2.
    const float own = factor_of(params, maxima, lane);
    const int32_t own_row = row + static_cast<int32_t>(lane % 2 * 8);
    if (own_row < row_end) {
      const int64_t of_part = (lane & 2) != 0 ? params.rows : 0;
      params.scales[(of_part + own_row) * params.scale_stride + column / kFp8Tile] =
          params.power_of_two ? inverse_of_power(own) : 1.f / own;
    }
    const int32_t to = column + static_cast<int32_t>(lane % 4 * 16);
    const uint32_t place = Slice::place_of_16(lane);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[half] = __shfl_sync(kAllLanes, own, 2 * part + half, 4);
      uint8_t* const codes = params.codes + (part * params.rows + row) * params.columns + to;
#pragma unroll
      for (int number = 0; number < 2; ++number) {
        if (number == slices) break;
        const bool has_columns = to + number * kSliceColumns < params.columns;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 words =
              codes_of((number == 0 ? first : second) + place, part, half, factor[half]);
          if (has_columns && row + 8 * half < row_end)
            *reinterpret_cast<uint4*>(codes + 8 * half * params.columns + number * kSliceColumns) =
                words;
        }
      }
    }
  }

 private:
  // The factor of part q / 2, row l / 4 + 8 (q % 2), q = lane % 4. The four lanes have the maxima of
  // their columns.
  __device__ __forceinline__ static float factor_of(const Params& params, const Maxima& maxima,
                                                    uint32_t lane) {
    constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
    uint32_t of_part[2];  // of the upper row, and of the lower one
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint32_t(&of)[2] = maxima.of[part];
      of_part[part] = ptx::max_magnitude(__byte_perm(of[0], of[1], kLowHalves),
                                         __byte_perm(of[0], of[1], kHighHalves), Element());
    }
    const bool up = (lane & 2) != 0;
    uint32_t own = up ? of_part[1] : of_part[0];
    const uint32_t other = up ? of_part[0] : of_part[1];
    own = ptx::max_magnitude(own, __shfl_xor_sync(kAllLanes, other, 2), Element());
    own = ptx::max_magnitude(own, __shfl_xor_sync(kAllLanes, own, 1), Element());
    const float2 two = unpack(own, Element());
    const float amax = fabsf((lane & 1) != 0 ? two.y : two.x);
    return params.power_of_two ? fp8_power_factor(amax) : fp8_factor(amax, params.largest, false);
  }

  // The codes of 16 columns of a row.
  __device__ __forceinline__ static uint4 codes_of(uint32_t place, int part, int half,
                                                   float factor) {
    uint32_t words[4];
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const uint4 dH = Slice::load_half_of_16(place, part, half, chunk);
      words[2 * chunk] = four_codes(dH.x, dH.y, factor);
      words[2 * chunk + 1] = four_codes(dH.z, dH.w, factor);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ static uint32_t four_codes(uint32_t low, uint32_t high, float factor) {
    return two_codes(low, factor) | static_cast<uint32_t>(two_codes(high, factor)) << 16;
  }
  __device__ static uint16_t two_codes(uint32_t two, float factor) {
    const float2 dH = unpack(two, Element());
    return ptx::float_to_e4m3(dH.x * factor, dH.y * factor);
  }
};

}  // namespace tilemoe::cuda::sm90
