// What building a rounded routing keeps in the caller's workspace.
#pragma once

#include <cstdint>

#include "routing/order.h"
#include "routing/scratch_layout.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

constexpr int64_t kWordTokens = 32;  // tokens of a mask

// A token's weight for an expert, in an order without signs: greater is chosen first. 0 where there
// is no token, 1 for NaN; the top bit tells whether the token chose the expert, and so whether the
// weight is s or p.
class WeightCode {
 public:
  static constexpr int kBits = 30;  // of the order: weights are at most 1
  static constexpr uint32_t kChosen = 1u << 31;
  static constexpr uint32_t kNone = 0;

  __device__ __forceinline__ static uint32_t of(float weight, bool chosen) {
    const int32_t key = order::key(weight);
    const uint32_t ordered = key == order::kNaNKey ? 1u : static_cast<uint32_t>(key) + 2;
    return chosen ? ordered | kChosen : ordered;
  }
  __device__ __forceinline__ static uint32_t ordered(uint32_t code) { return code & ~kChosen; }
  __device__ __forceinline__ static bool chosen(uint32_t code) { return (code & kChosen) != 0; }
  __device__ __forceinline__ static float weight(uint32_t code) {
    const uint32_t x = ordered(code);
    return order::from_key(x == 1 ? order::kNaNKey : static_cast<int32_t>(x - 2));
  }
};

// Which of 32 tokens an expert has rows for.
struct ExpertWord {
  uint32_t kept;        // those that chose it
  uint32_t added;       // those that did not
  int32_t rows_before;  // of the expert, for tokens before these
};

struct RoundScratch {
  int64_t words;        // of 32 tokens
  int32_t* counts;      // (E) f
  int32_t* targets;     // (E) f'
  int32_t* nan_tokens;  // (words) of each word
  int32_t* ids;         // (T, K) each token's choice
  float* scores;        // (T, K)
  uint32_t* codes;      // (E, words * 32)
  ExpertWord* masks;    // (words, E)

  RoundScratch(const tilemoe_routing_spec& spec, ScratchLayout& layout)
      : words((spec.T + kWordTokens - 1) / kWordTokens) {
    counts = layout.take<int32_t>(spec.E);
    targets = layout.take<int32_t>(spec.E);
    nan_tokens = layout.take<int32_t>(words);
    ids = layout.take<int32_t>(spec.T * spec.K);
    scores = layout.take<float>(spec.T * spec.K);
    codes = layout.take<uint32_t>(checked_product(spec.E, words * kWordTokens, "E * T"));
    masks = layout.take<ExpertWord>(checked_product(spec.E, words, "E * T"));
  }

  TILEMOE_HOST_DEVICE int64_t code_stride() const { return words * kWordTokens; }
};

// Fills ids, counts, codes and nan_tokens from the logits (T, E).
void weigh_tokens(const tilemoe_tensor& logits, int64_t K, const RoundScratch& scratch,
                  void* stream);

}  // namespace tilemoe::cuda
