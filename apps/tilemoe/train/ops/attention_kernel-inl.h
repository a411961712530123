// The loops of one head of one sequence, for attention.cpp.
#include <cmath>

#include "train/ops/attention_head.h"

#if defined(TILEMOE_TRAIN_OPS_ATTENTION_KERNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEMOE_TRAIN_OPS_ATTENTION_KERNEL_INL_H_
#undef TILEMOE_TRAIN_OPS_ATTENTION_KERNEL_INL_H_
#else
#define TILEMOE_TRAIN_OPS_ATTENTION_KERNEL_INL_H_
#endif

#include "train/ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::train::HWY_NAMESPACE {
namespace {

constexpr float kHidden = -1e30f;  // its exponential is 0

// dots[r][s] = <rows_r, columns_s> for s in [0, end); columns (w, stride)
void dot_products(const float* rows, const float* columns, int64_t width, int64_t stride,
                  int64_t end, float* dots) {
  for (int64_t s = 0; s < end; s += lanes()) {
    FloatVector sum[kQueries];
    for (int64_t r = 0; r < kQueries; ++r) sum[r] = zero();
    for (int64_t c = 0; c < width; ++c) {
      const FloatVector column = load(columns + c * stride + s);
      for (int64_t r = 0; r < kQueries; ++r)
        sum[r] = hn::MulAdd(broadcast(rows[r * width + c]), column, sum[r]);
    }
    for (int64_t r = 0; r < kQueries; ++r) store(sum[r], dots + r * stride + s);
  }
}

// out[r] = sum over s in [0, end) of weights[r][s] * values[s]; values (end, w)
void weighted_sums(const float* weights, int64_t stride, const float* values, int64_t width,
                   int64_t end, float* out) {
  for (int64_t c = 0; c < width; c += lanes()) {
    FloatVector sum[kQueries];
    for (int64_t r = 0; r < kQueries; ++r) sum[r] = zero();
    for (int64_t s = 0; s < end; ++s) {
      const FloatVector value = load(values + s * width + c);
      for (int64_t r = 0; r < kQueries; ++r)
        sum[r] = hn::MulAdd(broadcast(weights[r * stride + s]), value, sum[r]);
    }
    for (int64_t r = 0; r < kQueries; ++r) store(sum[r], out + r * width + c);
  }
}

// to[s] += sum over r of weights[r][s] * rows[r] for s in [0, end); to (end, w)
void add_outer_products(const float* weights, int64_t stride, const float* rows, int64_t width,
                        int64_t end, float* to) {
  for (int64_t c = 0; c < width; c += lanes()) {
    FloatVector row[kQueries];
    for (int64_t r = 0; r < kQueries; ++r) row[r] = load(rows + r * width + c);
    for (int64_t s = 0; s < end; ++s) {
      FloatVector even = load(to + s * width + c), odd = zero();
      for (int64_t r = 0; r < kQueries; r += 2) {
        even = hn::MulAdd(broadcast(weights[r * stride + s]), row[r], even);
        odd = hn::MulAdd(broadcast(weights[(r + 1) * stride + s]), row[r + 1], odd);
      }
      store(hn::Add(even, odd), to + s * width + c);
    }
  }
}

// Scores of `query` at positions s, s + 1, ...: less the penalty on distance, none ahead of it.
FloatVector causal_score(FloatVector product, int64_t s, int64_t query, float slope) {
  const FloatVector ahead =
      hn::Sub(hn::Iota(FloatTag(), static_cast<float>(s)), broadcast(static_cast<float>(query)));
  const FloatVector score = hn::MulAdd(broadcast(slope), ahead, product);
  return hn::IfThenElse(hn::Gt(ahead, zero()), broadcast(kHidden), score);
}

// Products in, exp(score - highest score) out; the sum and the highest score are returned.
struct RowSum {
  float sum, max;
};
RowSum exponentiate(float* row, int64_t end, int64_t query, float slope) {
  FloatVector highest = broadcast(kHidden);
  for (int64_t s = 0; s < end; s += lanes()) {
    const FloatVector score = causal_score(load(row + s), s, query, slope);
    store(score, row + s);
    highest = hn::Max(highest, score);
  }
  const float max = max_lanes(highest);
  FloatVector sums = zero();
  for (int64_t s = 0; s < end; s += lanes()) {
    const FloatVector e = exponential(hn::Sub(load(row + s), broadcast(max)));
    store(e, row + s);
    sums = hn::Add(sums, e);
  }
  return {sum_lanes(sums), max};
}

// to = factor * from
void scale_row(float factor, const float* from, float* to, int64_t width) {
  for (int64_t c = 0; c < width; c += lanes())
    store(hn::Mul(load(from + c), broadcast(factor)), to + c);
}

// scratch: 2 (padded, w), (w, padded) and kQueries rows of padded + 2w
void head_forward(const AttentionHead& head, float slope, const float* qkv, float* out,
                  float* log_sum, float* scratch) {
  const int64_t width = head.width, padded = head.padded_length();
  float* const values = scratch;                           // (padded, w)
  float* const keys_transposed = values + padded * width;  // (w, padded)
  float* const scores = keys_transposed + width * padded;  // (kQueries, padded)
  float* const queries = scores + kQueries * padded;       // (kQueries, w)
  float* const results = queries + kQueries * width;       // (kQueries, w)
  head.copy_keys(qkv, values);
  head.transpose(values, keys_transposed);
  head.copy_values(qkv, values);

  for (int64_t first = 0; first < head.length; first += kQueries) {
    const int64_t count = std::min(kQueries, head.length - first);
    const int64_t end = ceil_div(first + count, kRowMultiple) * kRowMultiple;
    head.copy_queries(qkv, first, kQueries, queries);
    dot_products(queries, keys_transposed, width, padded, end, scores);
    float sums[kQueries];
    for (int64_t r = 0; r < count; ++r) {
      const RowSum row = exponentiate(scores + r * padded, end, first + r, slope);
      sums[r] = row.sum;
      log_sum[first + r] = row.max + std::log(row.sum);
    }
    weighted_sums(scores, padded, values, width, end, results);
    for (int64_t r = 0; r < count; ++r)
      scale_row(1.f / sums[r], results + r * width, out + (first + r) * head.out_stride(), width);
  }
}

// p from products, and dscore = p (<dO, v> - <dO, O>) from <dO, v>.
void score_gradient(float* p, float* dscores, int64_t end, int64_t query, float slope,
                    float log_sum, float dout_out) {
  for (int64_t s = 0; s < end; s += lanes()) {
    const FloatVector score = causal_score(load(p + s), s, query, slope);
    const FloatVector p_s = exponential(hn::Sub(score, broadcast(log_sum)));
    store(p_s, p + s);
    store(hn::Mul(p_s, hn::Sub(load(dscores + s), broadcast(dout_out))), dscores + s);
  }
}

// scratch: 5 (padded, w) and kQueries rows of 2 padded + 3w
void head_backward(const AttentionHead& head, float slope, const float* qkv, const float* out,
                   const float* log_sum, const float* dout, float* dqkv, float* scratch) {
  const int64_t width = head.width, padded = head.padded_length(), area = padded * width;
  float* const keys = scratch;                              // (padded, w)
  float* const keys_transposed = keys + area;               // (w, padded)
  float* const values_transposed = keys_transposed + area;  // (w, padded)
  float* const dkeys = values_transposed + area;            // (padded, w)
  float* const dvalues = dkeys + area;                      // (padded, w)
  float* const p = dvalues + area;                          // (kQueries, padded)
  float* const dscores = p + kQueries * padded;             // (kQueries, padded)
  float* const queries = dscores + kQueries * padded;       // (kQueries, w)
  float* const douts = queries + kQueries * width;          // (kQueries, w)
  float* const dqueries = douts + kQueries * width;         // (kQueries, w)
  head.copy_values(qkv, keys);
  head.transpose(keys, values_transposed);
  head.copy_keys(qkv, keys);
  head.transpose(keys, keys_transposed);
  std::fill_n(dkeys, 2 * area, 0.f);

  for (int64_t first = 0; first < head.length; first += kQueries) {
    const int64_t count = std::min(kQueries, head.length - first);
    const int64_t end = ceil_div(first + count, kRowMultiple) * kRowMultiple;
    head.copy_queries(qkv, first, kQueries, queries);
    std::fill_n(douts, kQueries * width, 0.f);
    for (int64_t r = 0; r < count; ++r)
      std::copy_n(dout + (first + r) * head.out_stride(), width, douts + r * width);
    dot_products(queries, keys_transposed, width, padded, end, p);
    dot_products(douts, values_transposed, width, padded, end, dscores);
    for (int64_t r = 0; r < count; ++r)
      score_gradient(p + r * padded, dscores + r * padded, end, first + r, slope,
                     log_sum[first + r],
                     dot(douts + r * width, out + (first + r) * head.out_stride(), width));
    // Past the sequence a query and its dO are zero, and so are p and dscores there.
    weighted_sums(dscores, padded, keys, width, end, dqueries);
    for (int64_t r = 0; r < count; ++r)
      scale_row(head.scale(), dqueries + r * width, dqkv + (first + r) * head.qkv_stride(), width);
    add_outer_products(dscores, padded, queries, width, end, dkeys);  // queries are scaled already
    add_outer_products(p, padded, douts, width, end, dvalues);
  }
  head.put_key_gradients(dkeys, dqkv);
  head.put_value_gradients(dvalues, dqkv);
}

}  // namespace
}  // namespace tilemoe::train::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
