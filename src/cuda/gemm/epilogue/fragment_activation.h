// The up-projection's epilogue for one fragment (sm80, sm100): H = D + bias, stored if it is
// wanted, and A = act(H) from the float32 accumulators, so that inference and training give equal
// bits.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/epilogue/activation.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda {

// A fragment's columns are kParts parts of equal width: gate, then up of the same columns of A. If
// W1 has interleaved gate/up columns, H has too, and there is one part of both.
template <class Shape, Activations kActivations, bool kInterleavedColumns, FragmentStore Rows>
class FragmentActivation {
 public:
  static_assert(all_same<typename Rows::Element, typename Shape::Recipe::Out::H,
                         typename Shape::Recipe::Out::A>);
  static constexpr int kParts = kActivations == Activations::kPlain || kInterleavedColumns ? 1 : 2;
  static_assert(!kInterleavedColumns || kActivations == Activations::kGated);

  struct Params {
    typename Rows::Output H;  // (capacity, kParts, columns of a part); may be absent
    typename Rows::Output A;  // (capacity, 1, n)
    Bias bias[kParts];
    ActivationParams activation;
  };

  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    Params params{.H = Rows::output(H, biases.count, biases.columns),
                  .A = Rows::output(A, 1, experts.n),
                  .bias = {},
                  .activation = activation_params(experts)};
    for (int p = 0; p < kParts; ++p) params.bias[p] = bias_of(biases.part[p]);
    return params;
  }

  __device__ explicit FragmentActivation(const Params& params) : params_(params) {}

  // Columns of a part of H.
  __device__ int32_t columns() const { return params_.A.columns * (kInterleavedColumns ? 2 : 1); }

  // Finishes fragment m of the warp; its parts begin at `column` of H's parts.
  template <int kNumbers>
  __device__ __forceinline__ void finish(int m, const Tile& tile, int32_t column,
                                         float (&H)[1][kNumbers]) const {
    constexpr int kPart = 2 * kNumbers / kParts;                         // columns
    constexpr int kActivated = kInterleavedColumns ? kPart / 2 : kPart;  // of A
    finish_part<0, kPart>(0, m, tile, column, H);
    if constexpr (kParts == 2) finish_part<kPart / 2, kPart>(1, m, tile, column, H);
    if constexpr (kInterleavedColumns)
      activate_interleaved<kActivations>(params_.activation, H);
    else
      activate<kActivations>(params_.activation, H);
    store_fragment<kActivated>(Rows(0, 0), params_.A, m, tile.row_begin, tile.row_end, 0,
                               kInterleavedColumns ? column / 2 : column,
                               [&](int i) { return H[0][i]; });
  }

 private:
  // The part of H that begins at a lane's number kFirst.
  template <int kFirst, int kPart, int kNumbers>
  __device__ __forceinline__ void finish_part(int part, int m, const Tile& tile, int32_t column,
                                              float (&H)[1][kNumbers]) const {
    add_bias<typename Shape::Element, kFirst, kPart>(params_.bias[part], tile.expert, column, H);
    store_fragment<kPart>(Rows(0, 0), params_.H, m, tile.row_begin, tile.row_end, part, column,
                          [&](int i) { return H[0][kFirst + i]; });
  }

  const Params& params_;
};

}  // namespace tilemoe::cuda
