// Top-K: each token's best experts and their scores. A task is a block of tokens; counting the
// choices is one pass over the ids afterwards, since there is no scratch to count apart.
#include "cpu/backend.h"
#include "cpu/choose.h"
#include "cpu/element_types.h"
#include "cpu/native_fma.h"
#include "cpu/thread_pool.h"
#include "cpu/token_blocks.h"

namespace tilemoe::cpu {
namespace {

template <class Logit, class Id>
void choose_all(const tilemoe_top_k_args& args) {
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1], K = args.K;
  const auto* bias = static_cast<const float*>(args.selection_bias.data);
  auto* ids = static_cast<Id*>(args.ids.data);
  auto* scores = static_cast<float*>(args.scores.data);
  const Blocks blocks = token_blocks(T, E);
  parallel_for(blocks.count, [&](int64_t block, int) {
    with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
      for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t)
        choose_and_score(args.scoring, row_of<const Logit>(args.logits, t), bias, E, K,
                         scores + t * K, ids + t * K);
    });
  });
}

template <class Id>
void count_choices(const tilemoe_top_k_args& args) {
  const int64_t pairs = args.logits.shape[0] * args.K;
  auto* counts = static_cast<int32_t*>(args.expert_counts.data);
  const auto* ids = static_cast<const Id*>(args.ids.data);
  std::fill_n(counts, args.logits.shape[1], 0);
  for (int64_t pair = 0; pair < pairs; ++pair) ++counts[ids[pair]];
}

}  // namespace

void CpuBackend::top_k(const tilemoe_top_k_args& args) {
  with_integer_type(args.ids.dtype, [&](auto id) {
    using Id = typename decltype(id)::Type;
    with_float_type(args.logits.dtype,
                    [&](auto logit) { choose_all<typename decltype(logit)::Type, Id>(args); });
    if (present(args.expert_counts)) count_choices<Id>(args);
  });
}

}  // namespace tilemoe::cpu
