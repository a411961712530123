// The epilogue of the fp8 recipe's up-projection on Hopper: A as codes with scales. The promotion's
// registers leave none for deferred stores.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/fp8.h"
#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/activation.h"
#include "cuda/gemm/epilogue/activations.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ptx/convert.h"

namespace tilemoe::cuda::sm90 {

// H = D + bias in 16 bits or as codes, stored if the caller requests it, and A = act(H) as codes. A
// tile's columns are gate and up of 128 columns of A, with one scale each per row. kStoresA: A in 16
// bits too, if requested, for an adapter of W2; H then is not stored as codes.
template <class Shape, Activations kActivations, FragmentStore Rows, bool kStoresA>
class QuantizingEpilogue {
 public:
  static constexpr int kParts = 2;
  static constexpr int kColumns = kFp8Tile;  // of A
  static constexpr int kSharedBytes = Rows::kSharedBytes;
  static_assert(Shape::kFragments == 1 && Shape::BLOCK_N == kParts * kColumns);

  struct CommonParams {
    typename Rows::Output H;  // (capacity, 2, n); optional
    uint8_t* codes;           // of A, (capacity, n)
    float* scales;            // (capacity, scale_stride)
    int32_t n, scale_stride;
    Bias bias[kParts];
    ActivationParams activation;
    float largest;
    bool power_of_two;
  };
  struct ParamsWithoutA : CommonParams {
    Fp8H H_codes;  // optional
  };
  struct ParamsWithA : CommonParams {
    typename Rows::Output A;  // (capacity, 1, n); optional
  };
  using Params = std::conditional_t<kStoresA, ParamsWithA, ParamsWithoutA>;

  static Params params(const UpProjection& step, const UpParts& biases) {
    const tilemoe_experts& experts = *step.experts;
    Params params{};
    static_cast<CommonParams&>(params) = {
        .H = Rows::output(step.H, kParts, experts.n),
        .codes = step.A_codes.codes,
        .scales = step.A_codes.scales,
        .n = static_cast<int32_t>(experts.n),
        .scale_stride = static_cast<int32_t>(blocks_of(experts.n, kFp8Tile)),
        .bias = {bias_of(biases.part[0]), bias_of(biases.part[1])},
        .activation = activation_params(experts),
        .largest = largest_of(experts.dtype),
        .power_of_two = !step.float_scales};
    if constexpr (kStoresA)
      params.A = Rows::output(step.A, 1, experts.n);
    else
      params.H_codes = step.H_codes;
    return params;
  }

  __device__ QuantizingEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile,
                                        int32_t row) const {
    using Element = typename Rows::Element;
    if (row >= tile.row_end) return;
    const int32_t column = tile.n_block * kColumns;
    add_bias<Element, 0, kColumns>(params_.bias[0], tile.expert, column, D);
    add_bias<Element, kUp, kColumns>(params_.bias[1], tile.expert, column, D);
    if (params_.H.columns != 0) {
      store_columns<Shape, kColumns>(rows_, params_.H, row, tile.row_end, 0, column,
                                     [&](int m, int i) { return D[m][i]; });
      store_columns<Shape, kColumns>(rows_, params_.H, row, tile.row_end, 1, column,
                                     [&](int m, int i) { return D[m][kUp + i]; });
    }
    if constexpr (!kStoresA)
      if (params_.H_codes.codes != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t r = row + Shape::fragment_row(0) + fragment::row(half);
          store_row_of_H<0>(D, half, r, tile.row_end, column);
          store_row_of_H<1>(D, half, r, tile.row_end, column);
        }
      }
    activate<kActivations>(params_.activation, D);
    if constexpr (kStoresA)
      if (params_.A.columns != 0)
        store_columns<Shape, kColumns>(rows_, params_.A, row, tile.row_end, 0, column,
                                       [&](int m, int i) { return D[m][i]; });
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_row(D, half, row + Shape::fragment_row(0) + fragment::row(half), tile.row_end, column);
  }
  __device__ void finish() const {
    rows_.finish();
  }

 private:
  static constexpr int kUp = kColumns / 2;  // the first accumulator of the up part

  // The factor of the codes of a row's 128 columns from accumulator kFirst on, which four lanes have.
  template <int kFirst>
  __device__ __forceinline__ float factor_of(const Accumulators<Shape>& D, int half) const {
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) amax = fmaxf(amax, fabsf(D[0][kFirst + 4 * j + 2 * half + i]));
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
    return fp8_factor(amax, params_.largest, params_.power_of_two);
  }

  // Codes of 64 of these columns: 16 of them per lane, each four codes in the order of a fragment,
  // two of eight columns and then two of the next.
  template <int kFirst>
  __device__ __forceinline__ static uint4 codes_of(const Accumulators<Shape>& D, int half,
                                                   float factor, int32_t lane) {
    uint32_t word[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const float* const low = &D[0][kFirst + 8 * g + 2 * half];
      const float* const high = low + 4;
      word[g] = ptx::float_to_e4m3(low[0] * factor, low[1] * factor) |
                static_cast<uint32_t>(ptx::float_to_e4m3(high[0] * factor, high[1] * factor)) << 16;
    }
    return words_of_group(word, lane);
  }

  // Gate (kPart 0) or up of one row of H, in the order of core/fp8_rows.h.
  template <int kPart>
  __device__ __forceinline__ void store_row_of_H(const Accumulators<Shape>& D, int half,
                                                 int32_t row, int32_t row_end,
                                                 int32_t column) const {
    const float factor = factor_of<kPart * kUp>(D, half);
    const int32_t lane = fragment::lane() % 4;
    const bool stores = row < row_end;
    const Fp8H& to = params_.H_codes;
    constexpr auto kWidth = static_cast<int32_t>(kFp8HColumns);
    if (stores && lane == 0)
      to.scales[(int64_t{row} * params_.scale_stride + column / kColumns) * 2 + kPart] =
          1.f / factor;
    const auto store_half = [&](int group, const uint4& codes) {
      const int32_t first = column + kColumns / 2 * group + kWidth * lane;
      if (stores && first < params_.n)
        *reinterpret_cast<uint4*>(to.codes + int64_t{row} * 2 * params_.n + 2 * first +
                                  kPart * kWidth) = codes;
    };
    store_half(0, codes_of<kPart * kUp>(D, half, factor, lane));
    store_half(1, codes_of<kPart * kUp + kUp / 2>(D, half, factor, lane));
  }

  // Codes and scale of one row of A.
  __device__ __forceinline__ void store_row(const Accumulators<Shape>& D, int half, int32_t row,
                                            int32_t row_end, int32_t column) const {
    const float factor = factor_of<0>(D, half);
    const int32_t lane = fragment::lane() % 4;
    const bool stores = row < row_end;
    if (stores && lane == 0)
      params_.scales[int64_t{row} * params_.scale_stride + column / kColumns] = 1.f / factor;
    const auto store_half = [&](int part, const uint4& group) {
      const uint4 codes = codes_in_order(group);
      const int32_t to = column + kColumns / 2 * part + 16 * lane;
      if (stores && to < params_.n)
        *reinterpret_cast<uint4*>(params_.codes + int64_t{row} * params_.n + to) = codes;
    };
    store_half(0, codes_of<0>(D, half, factor, lane));
    store_half(1, codes_of<kUp / 2>(D, half, factor, lane));
  }

  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda::sm90
