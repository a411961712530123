// Causal attention within each sequence. Token t sees tokens s <= t, and
//   p(t, s) = softmax over s of <q_t, k_s> / sqrt(w) - slope_h (t - s),
// where k_s comes from the token BEFORE s and the value from s itself: a head can look up what
// followed earlier occurrences of the current token. The first token of a sequence has k = 0. The
// penalty on distance is ALiBi's (arXiv 2108.12409). Scores are never stored: the backward makes
// them again from the logarithm of each row's sum (arXiv 2205.14135).
#pragma once

#include "train/ops/sequences.h"

namespace tilemoe::train {

struct AttentionShape {
  Sequences sequences;
  int64_t heads = 0;
  int64_t head_width = 0;  // w, a multiple of kRowMultiple

  int64_t width() const { return heads * head_width; }  // D
};

// Floats that each worker needs as scratch, backward included.
int64_t attention_worker_scratch(const AttentionShape& shape);

void attention(const AttentionShape& shape,
               ConstFloats slopes,  // (heads)
               ConstFloats qkv,     // (T, 3D): queries, keys, values; head by head
               Floats out,          // out (T, D)
               Floats log_sum,      // out (sequences, heads, length), for the backward
               Floats scratch);     // (workers, attention_worker_scratch)

void attention_backward(const AttentionShape& shape,
                        ConstFloats slopes,   // (heads)
                        ConstFloats qkv,      // (T, 3D)
                        ConstFloats out,      // (T, D)
                        ConstFloats log_sum,  // (sequences, heads, length)
                        ConstFloats dout,     // (T, D)
                        Floats dqkv,          // out (T, 3D)
                        Floats scratch);

}  // namespace tilemoe::train
