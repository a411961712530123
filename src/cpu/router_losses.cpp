// The balance loss and the router's z-loss, and their gradient. A first pass sums by block of
// tokens, in float64 and in the order of blocks; a second pass, if requested, adds the gradient.
#include <cmath>

#include "cpu/choose.h"
#include "cpu/cpu_backend.h"
#include "cpu/matrix.h"
#include "cpu/native_fma.h"
#include "cpu/routing_scratch.h"
#include "cpu/thread_pool.h"
#include "routing/spec.h"

namespace tilemoe::cpu {
namespace {

struct LossSums {
  double balance, z;
  int64_t tokens;  // without a NaN
};

struct LossScratch {
  Blocks blocks;
  LossSums* sums;  // (blocks)
  float* load;     // (E) E * c_e / sum(c)

  LossScratch(int64_t T, int64_t E, ScratchLayout& layout) : blocks(token_blocks(T, E)) {
    sums = layout.take<LossSums>(blocks.count);
    load = layout.take<float>(E);
  }
};

// One token's softmax over all experts.
struct TokenLoss {
  float max, sum;
  float balance;  // sum of load_e p(e)
  double log_sum_exp() const { return max + std::log(static_cast<double>(sum)); }
};

// False for a token with a NaN logit.
template <class Logit>
TILEMOE_HOST_DEVICE bool token_loss(const Logit* row, int64_t E, const float* load,
                                    TokenLoss& token) {
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
  for (int64_t begin = 0; begin < E; begin += kChunk) {
    float x[kChunk];
    load_chunk(row, begin, E, x);
    for (int l = 0; l < kChunk; ++l) lowest = std::min(lowest, order::key(x[l]));
    for (int l = 0; l < kChunk; ++l) highest = std::max(highest, order::key(x[l]));
  }
  if (lowest == order::kNaNKey) return false;
  token.max = order::from_key(highest);
  float weights[kChunk] = {}, loads[kChunk] = {};
  for (int64_t begin = 0; begin < E; begin += kChunk) {
    float x[kChunk], y[kChunk] = {};
    const int count = load_chunk(row, begin, E, x);
    for (int l = 0; l < kChunk; ++l) x[l] = order::softmax_weight(x[l], token.max);
    for (int l = count; l < kChunk; ++l) x[l] = 0.f;
    for (int l = 0; l < count; ++l) y[l] = x[l] * load[begin + l];
    for (int l = 0; l < kChunk; ++l) weights[l] += x[l];
    for (int l = 0; l < kChunk; ++l) loads[l] += y[l];
  }
  token.sum = order::add_lanes(weights);
  token.balance = order::add_lanes(loads) / token.sum;
  return true;
}

template <class Logit>
void sum_block(const tilemoe_tensor& logits, int64_t block, const LossScratch& scratch) {
  LossSums sums{};
  with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
    for (int64_t t = scratch.blocks.begin(block); t < scratch.blocks.end(block); ++t) {
      TokenLoss token;
      if (!token_loss(row_of<const Logit>(logits, t), logits.shape[1], scratch.load, token))
        continue;
      const double log_sum_exp = token.log_sum_exp();
      sums.balance += token.balance;
      sums.z += log_sum_exp * log_sum_exp;
      ++sums.tokens;
    }
  });
  scratch.sums[block] = sums;
}

// dlogits += p_i (balance_scale (load_i - balance) + z_scale 2 log_sum_exp); nothing where p is 0,
// though the log may be infinite.
template <class Logit, class Out>
void add_gradient(const tilemoe_router_losses_args& args, int64_t block, double tokens,
                  const LossScratch& scratch) {
  const int64_t E = args.logits.shape[1];
  const auto balance_scale = static_cast<float>(args.balance_coefficient / tokens);
  with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
    for (int64_t t = scratch.blocks.begin(block); t < scratch.blocks.end(block); ++t) {
      const Logit* row = row_of<const Logit>(args.logits, t);
      Out* out = row_of<Out>(args.dlogits, t);
      TokenLoss token;
      if (!token_loss(row, E, scratch.load, token)) continue;
      const float z =
          args.z_coefficient == 0
              ? 0.f
              : static_cast<float>(2 * args.z_coefficient / tokens * token.log_sum_exp());
      for (int64_t begin = 0; begin < E; begin += kChunk) {
        float x[kChunk];
        const int count = load_chunk(row, begin, E, x);
        for (int l = 0; l < kChunk; ++l) x[l] = order::softmax_weight(x[l], token.max) / token.sum;
        for (int l = 0; l < count; ++l) {
          const float slope = balance_scale * (scratch.load[begin + l] - token.balance);
          const float gradient = x[l] == 0 ? 0.f : x[l] * (slope + z);
          store(to_float(out[begin + l]) + gradient, out[begin + l]);
        }
      }
    }
  });
}

void fill_load(const tilemoe_tensor& expert_counts, float* load) {
  const int64_t E = expert_counts.shape[0];
  const auto* counts = static_cast<const int32_t*>(expert_counts.data);
  int64_t sum = 0;
  for (int64_t e = 0; e < E; ++e) sum += counts[e];
  const double scale = sum == 0 ? 0 : static_cast<double>(E) / static_cast<double>(sum);
  for (int64_t e = 0; e < E; ++e) load[e] = static_cast<float>(counts[e] * scale);
}

}  // namespace

size_t router_losses_scratch_bytes(int64_t T, int64_t E) {
  ScratchLayout layout(nullptr);
  LossScratch(T, E, layout);
  return layout.used();
}

void router_losses(const tilemoe_router_losses_args& args) {
  ScratchLayout layout(args.workspace);
  const LossScratch scratch(args.logits.shape[0], args.logits.shape[1], layout);
  fill_load(args.expert_counts, scratch.load);
  LossSums total{};
  with_float(args.logits.dtype, [&]<class Logit>() {
    parallel_for(scratch.blocks.count,
                 [&](int64_t b, int) { sum_block<Logit>(args.logits, b, scratch); });
    for (int64_t b = 0; b < scratch.blocks.count; ++b) {
      total.balance += scratch.sums[b].balance;
      total.z += scratch.sums[b].z;
      total.tokens += scratch.sums[b].tokens;
    }
    if (!present(args.dlogits) || total.tokens == 0) return;
    with_float(args.dlogits.dtype, [&]<class Out>() {
      parallel_for(scratch.blocks.count, [&](int64_t b, int) {
        add_gradient<Logit, Out>(args, b, static_cast<double>(total.tokens), scratch);
      });
    });
  });
  if (!present(args.losses)) return;
  const auto tokens = static_cast<double>(std::max<int64_t>(1, total.tokens));
  auto* losses = static_cast<float*>(args.losses.data);
  losses[0] = static_cast<float>(total.balance / tokens);
  losses[1] = static_cast<float>(total.z / tokens);
}

}  // namespace tilemoe::cpu
