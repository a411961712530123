#include "train/ops/attention_head.h"

namespace tilemoe::train {

// Scaled by 1 / sqrt(w); zero past the sequence.
void AttentionHead::copy_queries(const float* qkv, int64_t first, int64_t count,
                                 float* queries) const {
  const float factor = scale();
  const int64_t known = std::min(count, length - first);
  for (int64_t r = 0; r < known; ++r) {
    const float* const query = qkv + (first + r) * qkv_stride();
    for (int64_t c = 0; c < width; ++c) queries[r * width + c] = factor * query[c];
  }
  std::fill_n(queries + known * width, (count - known) * width, 0.f);
}

void AttentionHead::copy_keys(const float* qkv, float* keys) const {
  std::fill_n(keys, padded_length() * width, 0.f);
  for (int64_t s = 1; s < length; ++s)
    std::copy_n(qkv + (s - 1) * qkv_stride() + out_stride(), width, keys + s * width);
}

void AttentionHead::copy_values(const float* qkv, float* values) const {
  std::fill_n(values, padded_length() * width, 0.f);
  for (int64_t s = 0; s < length; ++s)
    std::copy_n(qkv + s * qkv_stride() + 2 * out_stride(), width, values + s * width);
}

void AttentionHead::put_key_gradients(const float* dkeys, float* dqkv) const {
  for (int64_t s = 1; s < length; ++s)
    std::copy_n(dkeys + s * width, width, dqkv + (s - 1) * qkv_stride() + out_stride());
  std::fill_n(dqkv + (length - 1) * qkv_stride() + out_stride(), width, 0.f);
}

void AttentionHead::put_value_gradients(const float* dvalues, float* dqkv) const {
  for (int64_t s = 0; s < length; ++s)
    std::copy_n(dvalues + s * width, width, dqkv + s * qkv_stride() + 2 * out_stride());
}

void AttentionHead::transpose(const float* from, float* to) const {
  const int64_t padded = padded_length();
  for (int64_t s = 0; s < padded; ++s)
    for (int64_t c = 0; c < width; ++c) to[c * padded + s] = from[s * width + c];
}

}  // namespace tilemoe::train
