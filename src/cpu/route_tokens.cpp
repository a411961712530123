// Routing at small T: logits, then the steps top-K and routing. A task is the logits of some
// experts and all tokens.
#include <algorithm>

#include "core/check.h"
#include "cpu/cpu_backend.h"
#include "cpu/matrix.h"
#include "cpu/native_fma.h"
#include "cpu/thread_pool.h"
#include "routing/decode.h"
#include "routing/spec.h"

namespace tilemoe::cpu {
namespace {

using decode::kLaneColumns, decode::kPartColumns, decode::kStretches;
using order::kSumLanes;

constexpr int64_t kTaskExperts = 8;

struct TokenScratch {
  char* logits;  // (T, E) of at most 4 bytes
  int32_t* ids;  // (T, K)
  float* scores;
  char* pairs;  // of route_top_k

  TokenScratch(const tilemoe_routing_spec& spec, size_t pair_bytes, ScratchLayout& layout) {
    logits = layout.take<char>(spec.T * spec.E * static_cast<int64_t>(sizeof(float)));
    ids = layout.take<int32_t>(spec.pairs);
    scores = layout.take<float>(spec.pairs);
    pairs = layout.take<char>(static_cast<int64_t>(pair_bytes));
  }
};

// A part of a row with the lanes' numbers side by side, so that a vector holds a step of all lanes.
struct PartByLanes {
  float of[kStretches][kLaneColumns][kSumLanes];

  template <class Element>
  TILEMOE_HOST_DEVICE void load(const Element* row, int64_t part, int64_t d) {
    for (int s = 0; s < kStretches; ++s)
      for (int l = 0; l < kSumLanes; ++l) {
        const int64_t first = decode::first_column(part, s, l);
        for (int i = 0; i < kLaneColumns; ++i)
          of[s][i][l] = first < d ? to_float(row[first + i]) : 0.f;
      }
  }
};

TILEMOE_HOST_DEVICE float part_sum(const PartByLanes& x, const PartByLanes& weight) {
  float lanes[kSumLanes] = {};
  for (int s = 0; s < kStretches; ++s)
    for (int i = 0; i < kLaneColumns; ++i)
      for (int l = 0; l < kSumLanes; ++l)
        lanes[l] = fmaf(x.of[s][i][l], weight.of[s][i][l], lanes[l]);
  return order::add_lanes(lanes);
}

float bias_at(const tilemoe_tensor& bias, int64_t e) {
  return with_float(bias.dtype, [&]<class Element>() {
    return to_float(static_cast<const Element*>(bias.data)[e]);
  });
}

template <class Element, class Weight, class Logit>
void logits_of_experts(const tilemoe_route_tokens_args& args, int64_t first, int64_t count,
                       Logit* logits) {
  const int64_t T = args.X.shape[0], d = args.X.shape[1], E = args.router_weight.shape[0];
  float sum[decode::kMaxTokens][kTaskExperts] = {};
  with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
    PartByLanes weight[kTaskExperts], x;
    for (int64_t part = 0; part < decode::parts_of(d); ++part) {
      for (int64_t e = 0; e < count; ++e)
        weight[e].load(row_of<const Weight>(args.router_weight, first + e), part, d);
      for (int64_t t = 0; t < T; ++t) {
        x.load(row_of<const Element>(args.X, t), part, d);
        for (int64_t e = 0; e < count; ++e) sum[t][e] += part_sum(x, weight[e]);
      }
    }
  });
  for (int64_t e = 0; e < count; ++e) {
    const bool biased = present(args.router_bias);
    const float bias = biased ? bias_at(args.router_bias, first + e) : 0.f;
    for (int64_t t = 0; t < T; ++t)
      store(biased ? sum[t][e] + bias : sum[t][e], logits[t * E + first + e]);
  }
}

template <class Element, class Weight>
void fill_logits(const tilemoe_route_tokens_args& args, const tilemoe_tensor& logits) {
  const int64_t E = args.router_weight.shape[0];
  with_float(logits.dtype, [&]<class Logit>() {
    parallel_for((E + kTaskExperts - 1) / kTaskExperts, [&](int64_t task, int) {
      const int64_t first = task * kTaskExperts;
      logits_of_experts<Element, Weight>(args, first, std::min(kTaskExperts, E - first),
                                         static_cast<Logit*>(logits.data));
    });
  });
}

// A contiguous matrix in scratch.
tilemoe_tensor matrix(void* data, tilemoe_dtype dtype, int64_t rows, int64_t columns) {
  tilemoe_tensor tensor{};
  tensor.data = data, tensor.dtype = dtype, tensor.ndim = 2;
  tensor.shape[0] = rows, tensor.shape[1] = columns;
  tensor.stride[0] = columns, tensor.stride[1] = 1;
  return tensor;
}

}  // namespace

size_t route_tokens_scratch_bytes(const tilemoe_routing_spec& spec, int64_t /*d*/) {
  ScratchLayout layout(nullptr);
  const TokenScratch scratch(spec, routing_scratch_bytes(spec), layout);
  return layout.used();
}

void route_tokens(const tilemoe_routing& routing, const tilemoe_route_tokens_args& args) {
  const tilemoe_routing_spec& spec = routing.spec;
  const size_t pair_bytes = routing_scratch_bytes(spec);
  ScratchLayout layout(args.workspace);
  const TokenScratch scratch(spec, pair_bytes, layout);
  const tilemoe_tensor logits = present(args.logits)
                                    ? args.logits
                                    : matrix(scratch.logits, args.logits_dtype, spec.T, spec.E);
  with_float(args.X.dtype, [&]<class Element>() {
    with_float(args.router_weight.dtype,
               [&]<class Weight>() { fill_logits<Element, Weight>(args, logits); });
  });

  tilemoe_top_k_args choice{};
  choice.scoring = args.scoring, choice.K = spec.K;
  choice.logits = logits;
  choice.selection_bias = args.selection_bias;
  choice.ids = matrix(scratch.ids, TILEMOE_INT32, spec.T, spec.K);
  choice.scores = matrix(scratch.scores, TILEMOE_FLOAT32, spec.T, spec.K);
  choice.expert_counts = args.expert_counts;
  choice.n_group = args.n_group, choice.topk_group = args.topk_group;
  choice.group_score = args.group_score;
  choice.routed_scaling_factor = args.routed_scaling_factor;
  top_k(choice);

  tilemoe_route_top_k_args pairs{};
  pairs.ids = choice.ids, pairs.scores = choice.scores;
  pairs.workspace = scratch.pairs, pairs.workspace_bytes = pair_bytes;
  route_top_k(routing, pairs);
}

}  // namespace tilemoe::cpu
