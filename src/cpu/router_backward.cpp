// From the scores' gradient to the logits'. A task is a block of tokens; a token's gradient is
// summed in a float32 row of its own and rounded once.
#include <algorithm>

#include "cpu/choose.h"
#include "cpu/cpu_backend.h"
#include "cpu/matrix.h"
#include "cpu/native_fma.h"
#include "cpu/routing_scratch.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

// A token's pairs that have a row: expert, s and ds.
class TokenPairs {
 public:
  TokenPairs(const tilemoe_routing& routing, const float* ds, int64_t t)
      : routing_(routing), ds_(ds) {
    const bool offsets = routing.token_offsets != nullptr;
    begin_ = offsets ? routing.token_offsets[t] : t * routing.spec.K;
    end_ = offsets ? routing.token_offsets[t + 1] : (t + 1) * routing.spec.K;
  }

  // visit(expert, s, ds) in the order of pairs.
  template <class Visit>
  void each(const Visit& visit) const {
    const int32_t* offsets = routing_.offsets;
    for (int64_t pair = begin_; pair < end_; ++pair) {
      const int32_t row = routing_.pair_row[pair];
      if (row < 0) continue;
      const int32_t* after = std::upper_bound(offsets, offsets + routing_.spec.E + 1, row);
      visit(static_cast<int64_t>(after - offsets) - 1, routing_.row_score[row], ds_[pair]);
    }
  }

  // sum of s ds
  float dot() const {
    float sum = 0.f;
    each([&](int64_t, float s, float ds) { sum += s * ds; });
    return sum;
  }

 private:
  const tilemoe_routing& routing_;
  const float* ds_;
  int64_t begin_, end_;
};

// g_i = -p_i * dot for every expert: the part that a softmax over all takes from this logit because
// the others gained.
template <class Logit>
void subtract_softmax(const Logit* row, int64_t E, float max, float dot, float* g) {
  with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
    const float scale = -dot / softmax_sum(row, E, max);
    for (int64_t begin = 0; begin < E; begin += kChunk) {
      float x[kChunk];
      const int count = load_chunk(row, begin, E, x);
      for (int l = 0; l < kChunk; ++l) x[l] = order::softmax_weight(x[l], max) * scale;
      for (int l = 0; l < count; ++l) g[begin + l] = x[l];
    }
  });
}

template <class Logit>
float largest(const Logit* row, int64_t E) {
  int32_t best = INT32_MIN;
  for (int64_t e = 0; e < E; ++e) best = std::max(best, order::key(to_float(row[e])));
  return order::from_key(best);
}

// Token rounding: s is a share of the K chosen where the token chose the expert, whether it was
// kept or not, and a share of all E where it was added.
template <class Logit>
void rounded_gradient(const Logit* row, const TokenPairs& pairs, int64_t E, int64_t K, int32_t* ids,
                      float* scores, float* chosen_ds, float* g) {
  bool any_nan = false;
  with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
    any_nan = choose_and_score({TILEMOE_SOFTMAX_RENORMALIZED, E, K}, row, scores, ids);
  });
  std::fill_n(chosen_ds, K, 0.f);
  int64_t k = 0;
  float chosen_dot = 0.f, added_dot = 0.f;
  bool any_added = false;
  // The kept stand in the order of the K, before the added.
  pairs.each([&](int64_t e, float s, float ds) {
    k = std::find(ids + k, ids + K, e) - ids;
    if (k < K) {
      chosen_ds[k++] = ds;
      chosen_dot += s * ds;
    } else {
      any_added = true;
      added_dot += s * ds;
    }
  });
  if (any_added) {
    subtract_softmax(row, E, any_nan ? scores[0] : to_float(row[ids[0]]), added_dot, g);
    pairs.each([&](int64_t e, float s, float ds) {
      if (std::find(ids, ids + K, e) == ids + K) g[e] += s * ds;
    });
  }
  for (k = 0; k < K; ++k) g[ids[k]] += scores[k] * (chosen_ds[k] - chosen_dot);
}

// g (E) of one token, from zeros. Every s has `factor` in it, which the gradient of a share of a
// sum sees once, as s, and not twice, as s in the dot product of all.
template <class Logit>
void top_k_gradient(tilemoe_scoring scoring, float factor, const Logit* row,
                    const TokenPairs& pairs, int64_t E, float* g) {
  switch (scoring) {
    case TILEMOE_SOFTMAX_OVER_CHOSEN:
    case TILEMOE_SOFTMAX_RENORMALIZED: {
      const float dot = pairs.dot() / factor;
      pairs.each([&](int64_t e, float s, float ds) { g[e] += s * (ds - dot); });
      return;
    }
    case TILEMOE_SOFTMAX_OVER_ALL:
      subtract_softmax(row, E, largest(row, E), pairs.dot(), g);
      pairs.each([&](int64_t e, float s, float ds) { g[e] += s * ds; });
      return;
    case TILEMOE_SIGMOID:
      pairs.each([&](int64_t e, float, float ds) {
        const float x = to_float(row[e]);
        g[e] += order::sigmoid(x) * order::sigmoid(-x) * (factor * ds);
      });
      return;
    case TILEMOE_SIGMOID_RENORMALIZED: {
      const float dot = pairs.dot() / factor;
      pairs.each([&](int64_t e, float s, float ds) {
        g[e] += s * order::sigmoid(-to_float(row[e])) * (ds - dot);
      });
      return;
    }
  }
}

template <class Out>
void write_row(const float* g, int64_t E, bool add, Out* out) {
  if (add)
    for (int64_t e = 0; e < E; ++e) store(to_float(out[e]) + g[e], out[e]);
  else
    for (int64_t e = 0; e < E; ++e) store(g[e], out[e]);
}

template <class Logit, class Out>
void backward_block(const tilemoe_router_backward_args& args, int64_t block,
                    const BackwardScratch& scratch) {
  const tilemoe_routing& routing = *args.routing;
  const int64_t E = routing.spec.E, K = routing.spec.K;
  const bool has_logits = present(args.logits);
  float* g = scratch.gradient + block * E;
  for (int64_t t = scratch.tokens.begin(block); t < scratch.tokens.end(block); ++t) {
    const TokenPairs pairs(routing, static_cast<const float*>(args.ds.data), t);
    const Logit* row = has_logits ? row_of<const Logit>(args.logits, t) : nullptr;
    std::fill_n(g, E, 0.f);
    if (routing.spec.kind == TILEMOE_ROUTING_ROUNDED)
      rounded_gradient(row, pairs, E, K, scratch.ids + block * K, scratch.scores + block * K,
                       scratch.ds + block * K, g);
    else
      top_k_gradient(args.scoring, args.routed_scaling_factor, row, pairs, E, g);
    write_row(g, E, args.accumulate != 0, row_of<Out>(args.dlogits, t));
  }
}

}  // namespace

size_t routing_scratch_bytes(const tilemoe_routing_spec& spec) {
  ScratchLayout build(nullptr), back(nullptr);
  switch (spec.kind) {
    case TILEMOE_ROUTING_TOP_K:
      PairScratch(spec, build);
      BackwardScratch(spec, back);
      break;
    case TILEMOE_ROUTING_GENERAL: PairScratch(spec, build); break;
    case TILEMOE_ROUTING_ROUNDED:
      RoundScratch(spec, build);
      BackwardScratch(spec, back);
      break;
    case TILEMOE_ROUTING_GROUPED: break;
  }
  return std::max(build.used(), back.used());
}

void router_backward(const tilemoe_router_backward_args& args) {
  ScratchLayout layout(args.workspace);
  const BackwardScratch scratch(args.routing->spec, layout);
  const tilemoe_dtype logits_dtype = present(args.logits) ? args.logits.dtype : TILEMOE_FLOAT32;
  with_float(logits_dtype, [&]<class Logit>() {
    with_float(args.dlogits.dtype, [&]<class Out>() {
      parallel_for(scratch.tokens.count,
                   [&](int64_t block, int) { backward_block<Logit, Out>(args, block, scratch); });
    });
  });
}

}  // namespace tilemoe::cpu
