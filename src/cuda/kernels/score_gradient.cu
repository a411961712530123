// ds of every pair: the sum of its row's groups of columns, in order, and <dO_t, b2_e>.
#include "core/check.h"
#include "cuda/core/experts_plan.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/warp_choice.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPairThreads = 1024;  // if every SM has enough pairs
constexpr int kWarpPairs = 4;       // pairs of a warp, with biases

struct ScoreGradientParams {
  const float* ds_partial;  // (ds_groups, capacity)
  int64_t capacity;
  int32_t ds_groups;
  int32_t pairs;
  int32_t E;
  int32_t chunks;            // of 16 bytes, a row of dO
  const int32_t* offsets;    // (E + 1)
  const int32_t* pair_row;   // (pairs); null: grouped, pair r is row r
  const int32_t* row_token;  // (capacity); null: row r is row r of dO
  const char* dO;            // (T, d)
  int64_t dO_bytes;          // from row to row
  const char* b2;            // (E, d)
  int64_t b2_bytes;
  float* ds;  // (pairs)
};

// -1 where the pair has no row.
__device__ int32_t row_of_pair(const ScoreGradientParams& params, int32_t pair) {
  if (params.pair_row != nullptr) return params.pair_row[pair];
  return pair < params.offsets[params.E] ? pair : -1;
}

__device__ float sum_groups(const ScoreGradientParams& params, int32_t row) {
  const float* const sums = params.ds_partial + row;
  float ds = 0;
#pragma unroll 8  // loads that do not wait for each other
  for (int32_t group = 0; group < params.ds_groups; ++group) ds += sums[group * params.capacity];
  return ds;
}

// One thread per pair. The rows of an expert are in the order of their tokens: several tokens of a
// large CTA are adjacent there, so one load of 32 bytes from memory serves all of them.
__global__ void __launch_bounds__(kPairThreads) sum_partials(const ScoreGradientParams params) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pair >= params.pairs) return;
  const int32_t row = row_of_pair(params, static_cast<int32_t>(pair));
  params.ds[pair] = row < 0 ? 0.f : sum_groups(params, row);
}

// A warp has kWarpPairs neighbours: those of one token share the loads of its row of dO.
template <class Element>
__global__ void __launch_bounds__(kThreads) sum_with_bias(const ScoreGradientParams params) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kWarpPairs;
  if (first >= params.pairs) return;
  // The first lanes have a pair each. Next to a pair with a row, one without reads the first rows.
  const int64_t own_pair = first + lane_index();
  const bool has_pair = lane_index() < kWarpPairs && own_pair < params.pairs;
  const int32_t own_row = has_pair ? row_of_pair(params, static_cast<int32_t>(own_pair)) : -1;
  int32_t own_expert = 0;
  int64_t own_token = 0;
  if (own_row >= 0) {
    own_token = params.row_token != nullptr ? params.row_token[own_row] : own_row;
    own_expert = expert_of_row(params.offsets, params.E, own_row);
  }
  const uint4 *dO[kWarpPairs], *b2[kWarpPairs];
#pragma unroll
  for (int p = 0; p < kWarpPairs; ++p) {
    const int64_t token = __shfl_sync(kAllLanes, own_token, p);
    const int64_t expert = __shfl_sync(kAllLanes, own_expert, p);
    dO[p] = reinterpret_cast<const uint4*>(params.dO + token * params.dO_bytes);
    b2[p] = reinterpret_cast<const uint4*>(params.b2 + expert * params.b2_bytes);
  }
  float dot[kWarpPairs] = {};
  const int32_t chunks = __any_sync(kAllLanes, own_row >= 0) ? params.chunks : 0;
  for (int32_t chunk = lane_index(); chunk < chunks; chunk += kWarp) {
    uint4 bias[kWarpPairs];
#pragma unroll
    for (int p = 0; p < kWarpPairs; ++p) bias[p] = b2[p][chunk];
    float x[8], y[8];
#pragma unroll
    for (int p = 0; p < kWarpPairs; ++p) {
      if (p == 0 || dO[p] != dO[p - 1]) unpack_eight<Element>(dO[p][chunk], x);
      unpack_eight<Element>(bias[p], y);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot[p] = fmaf(x[i], y[i], dot[p]);
    }
  }
  float own_dot = 0;
#pragma unroll
  for (int p = 0; p < kWarpPairs; ++p) {
    const float sum = sum_of_lanes(dot[p]);
    if (lane_index() == p) own_dot = sum;
  }
  if (has_pair) params.ds[own_pair] = own_row < 0 ? 0.f : sum_groups(params, own_row) + own_dot;
}

}  // namespace

void score_gradient(const ScoreGradient& step) {
  constexpr int64_t kElementBytes = 2;
  const tilemoe_routing& routing = *step.routing;
  const bool biased = present(step.b2);
  const ScoreGradientParams params{
      .ds_partial = step.ds_partial,
      .capacity = routing.spec.capacity,
      .ds_groups = static_cast<int32_t>(ds_groups(step.experts->n)),
      .pairs = static_cast<int32_t>(routing.spec.pairs),
      .E = static_cast<int32_t>(routing.spec.E),
      .chunks = static_cast<int32_t>(step.experts->d * kElementBytes / 16),
      .offsets = routing.offsets,
      .pair_row = routing.pair_row,
      .row_token = routing.row_token,
      .dO = static_cast<const char*>(step.dO.data),
      .dO_bytes = step.dO.stride[0] * kElementBytes,
      .b2 = static_cast<const char*>(step.b2.data),
      .b2_bytes = step.b2.stride[0] * kElementBytes,
      .ds = step.ds};
  if (params.pairs == 0) return;
  const int64_t all_threads =
      biased ? blocks_of(params.pairs, kWarpPairs) * kWarp : int64_t{params.pairs};
  const bool large = params.pairs >= int64_t{kPairThreads} * device_of(step.tuning.plan).sms;
  const int threads = !biased && large ? kPairThreads : kThreads;
  const auto kernel = with_element(step.experts->dtype, [&]<class Element>() {
    return biased ? &sum_with_bias<Element> : &sum_partials;
  });
  const auto blocks = static_cast<unsigned>((all_threads + threads - 1) / threads);
  launch_kernel(
      "score gradient",
      {.blocks = blocks, .threads = threads, .stream = static_cast<cudaStream_t>(step.stream)},
      kernel, params);
}

}  // namespace tilemoe::cuda
