// One head of one sequence: where it lies in qkv and dqkv, copied to where it is read at full
// speed.
#pragma once

#include <cmath>

#include "train/ops/tasks.h"

namespace tilemoe::train {

// Queries that share each load of a key or a value: eight sums in flight hide the latency of a
// multiply-add on two ports.
inline constexpr int64_t kQueries = 8;

struct AttentionHead {
  int64_t length = 0;  // tokens of the sequence
  int64_t width = 0;   // w
  int64_t heads = 0;

  // Rows of the copies: a multiple of kRowMultiple. Those past the sequence are zero.
  int64_t padded_length() const { return ceil_div(length, kRowMultiple) * kRowMultiple; }
  float scale() const { return 1.f / std::sqrt(static_cast<float>(width)); }
  int64_t out_stride() const { return heads * width; }      // D
  int64_t qkv_stride() const { return 3 * heads * width; }  // 3D

  // `qkv` and `dqkv` point to the head's query of the sequence's first token. The key of position s
  // is that of token s - 1, and zero for the first.
  void copy_queries(const float* qkv, int64_t first, int64_t count, float* queries) const;
  void copy_keys(const float* qkv, float* keys) const;      // (padded, w)
  void copy_values(const float* qkv, float* values) const;  // (padded, w)
  void put_key_gradients(const float* dkeys, float* dqkv) const;
  void put_value_gradients(const float* dvalues, float* dqkv) const;
  // (padded, w) to (w, padded)
  void transpose(const float* from, float* to) const;
};

}  // namespace tilemoe::train
