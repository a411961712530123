// The router's backward: its parameters, the pairs of a token, the window of a row in shared memory
// that their gradients are added into, and the types of logits and gradients.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/warp_choice.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

struct BackwardParams {
  tilemoe_scoring scoring;
  float factor;  // in every s
  bool rounded;
  int64_t T, E, K;
  const int32_t* offsets;        // (E + 1)
  const float* row_score;        // (capacity)
  const int32_t* pair_row;       // (pairs)
  const int32_t* token_offsets;  // (T + 1); null: K pairs a token
  const float* ds;               // (pairs)
  const void* logits;            // (T, E); null if the scores alone determine it
  int64_t logits_stride;
  const int32_t* chosen;  // (T, K) rounded: each token's choice
  void* dlogits;          // (T, E)
  int64_t dlogits_stride;
  bool accumulate;
};

// A pair of a token; without a row it has no expert, and s = ds = 0.
struct Pair {
  int32_t expert;
  float s, ds;
};

class TokenPairs {
 public:
  __device__ TokenPairs(const BackwardParams& params, int64_t t) : params_(params) {
    const bool offsets = params.token_offsets != nullptr;
    begin_ = offsets ? params.token_offsets[t] : t * params.K;
    end_ = offsets ? params.token_offsets[t + 1] : (t + 1) * params.K;
  }

  // visit(Pair) by all lanes together, for 32 pairs at a time in their order.
  template <class Visit>
  __device__ void each(const Visit& visit) const {
    for (int64_t first = begin_; first < end_; first += kWarp) {
      const int64_t pair = first + lane_index();
      const int32_t row = pair < end_ ? params_.pair_row[pair] : -1;
      if (row < 0)
        visit(Pair{-1, 0.f, 0.f});
      else
        visit(Pair{expert_of_row(params_.offsets, static_cast<int32_t>(params_.E), row),
                   params_.row_score[row], params_.ds[pair]});
    }
  }

 private:
  const BackwardParams& params_;
  int64_t begin_, end_;
};

// Lanes of equal place add one after another, in their order: a caller's ids may repeat. A negative
// place is none.
__device__ inline void add_to_window(float* window, int32_t place, float gradient) {
  const uint32_t same = __match_any_sync(kAllLanes, place);
  const int turn = place >= 0 ? __popc(same & ((1u << lane_index()) - 1)) : -1;
  for (int i = 0; __any_sync(kAllLanes, turn >= i); ++i) {
    if (turn == i) window[place] += gradient;
    __syncwarp();
  }
}

// The types of logits and of their gradient, which is of the logits' type or float32.

// Calls body.operator()<Logit, Gradient>(); rejects any other type of the gradient.
template <class Body>
void with_gradient_types(tilemoe_dtype logits, tilemoe_dtype gradient, const Body& body) {
  with_float(logits, [&]<class Logit>() {
    if (gradient == TILEMOE_FLOAT32)
      body.template operator()<Logit, float>();
    else
      with_one_of<Logit>(gradient,
                         [&]<class Gradient>() { body.template operator()<Logit, Gradient>(); });
  });
}

}  // namespace tilemoe::cuda
