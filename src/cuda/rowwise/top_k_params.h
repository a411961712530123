// What the kernels of top-K are given, and what they rank by.
#pragma once

#include <cstdint>

#include "cuda/rowwise/arrays.h"
#include "cuda/rowwise/group_choice.h"
#include "routing/order.h"

namespace tilemoe::cuda {

struct TopKParams {
  LogitRows logits;   // (T, E)
  const float* bias;  // (E); null: none
  IntegerArray ids;   // (T, K)
  float* scores;      // (T, K)
  int32_t* counts;    // (E); null: not wanted
  int64_t T;
  int32_t E, K;
  tilemoe_scoring scoring;
  float factor;  // of every score
  GroupLimit groups;
};

// What a choice by sigmoid ranks by.
__device__ __forceinline__ float biased_sigmoid(const TopKParams& params, float logit, int64_t e) {
  const float value = order::sigmoid(logit);
  return params.bias == nullptr ? value : value + params.bias[e];
}

}  // namespace tilemoe::cuda
