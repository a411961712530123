// Causal attention (train/operators.h): a CTA per query or key of one head. Scores live in
// shared memory, so a sequence is as long as that allows.
#include <stdexcept>
#include <string>

#include "train/cuda/kernels.h"
#include "train/cuda/launch.h"

namespace tilemoe::train::cuda {
namespace {

constexpr size_t kSharedBytes = size_t{48} << 10;  // of a CTA by default

// One head of one sequence. CTA b has token b % length of it, so b counts log_sum's elements.
struct Head {
  const float* q;     // of the sequence's first token; rows of 3D
  float* dq;          // null in the forward
  const float* out;   // rows of D
  const float* dout;  // null in the forward
  const float* log_sum;
  float slope, scale;
  int length, width, stride, out_stride;

  __device__ const float* query(int t) const { return q + static_cast<int64_t>(t) * stride; }
  // The key of position s is the token's before it; the first one's is zero.
  __device__ const float* key(int s) const { return query(s - 1) + out_stride; }
  __device__ const float* value(int s) const { return query(s) + 2 * out_stride; }
  __device__ float* query_gradient(int t) const { return dq + static_cast<int64_t>(t) * stride; }
  __device__ const float* output(int t) const { return out + static_cast<int64_t>(t) * out_stride; }
  __device__ const float* output_gradient(int t) const {
    return dout + static_cast<int64_t>(t) * out_stride;
  }

  __device__ float dot(const float* a, const float* b) const {
    float sum = 0;
    for (int c = 0; c < width; ++c) sum += a[c] * b[c];
    return sum;
  }
  __device__ float score(int t, int s) const {
    const float qk = s > 0 ? scale * dot(query(t), key(s)) : 0.f;
    return qk - slope * static_cast<float>(t - s);
  }
  __device__ float probability(int t, int s) const { return expf(score(t, s) - log_sum[t]); }
  // p (<dO, v> - <dO, O>)
  __device__ float score_gradient(float p, int t, int s) const {
    return p * (dot(output_gradient(t), value(s)) - dot(output_gradient(t), output(t)));
  }
};

struct Attention {
  const float *slopes, *qkv, *out, *log_sum, *dout;
  float* dqkv;
  int length, heads, width;

  __device__ Head head() const {
    const int64_t index = blockIdx.x / length;
    const int64_t sequence = index / heads, h = index % heads, D = heads * width;
    const int64_t in_qkv = sequence * length * 3 * D + h * width;
    const int64_t in_out = sequence * length * D + h * width;
    return {.q = qkv + in_qkv,
            .dq = dqkv ? dqkv + in_qkv : nullptr,
            .out = out + in_out,
            .dout = dout ? dout + in_out : nullptr,
            .log_sum = log_sum + index * length,
            .slope = slopes[h],
            .scale = rsqrtf(static_cast<float>(width)),
            .length = length,
            .width = width,
            .stride = static_cast<int>(3 * D),
            .out_stride = static_cast<int>(D)};
  }
  __device__ int token() const { return static_cast<int>(blockIdx.x) % length; }
};

// The same value in every thread; `parts` (kWarps) is free again after a barrier.
template <class Combine>
__device__ float block_reduce(float value, float* parts, Combine&& combine) {
  if (lane() == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = parts[0];
  for (unsigned warp = 1; warp < kWarps; ++warp) value = combine(value, parts[warp]);
  __syncthreads();
  return value;
}

// put(c, sum over i in [first, last) of weights[i - first] * row(i)[c]), a warp a column.
template <class Row, class Put>
__device__ void weighted_rows(const float* weights, int first, int last, int width, Row&& row,
                              Put&& put) {
  for (int c = static_cast<int>(threadIdx.x / kWarp); c < width; c += kWarps) {
    float sum = 0;
    for (int i = first + static_cast<int>(lane()); i < last; i += kWarp)
      sum += weights[i - first] * row(i)[c];
    sum = warp_sum(sum);
    if (lane() == 0) put(c, sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    attend(Attention attention, float* out, float* log_sum) {
  extern __shared__ float scores[];  // (length)
  __shared__ float parts[kWarps];
  const Head head = attention.head();
  const int t = attention.token(), first = static_cast<int>(threadIdx.x);
  float highest = -INFINITY;
  for (int s = first; s <= t; s += kThreads) {
    scores[s] = head.score(t, s);
    highest = fmaxf(highest, scores[s]);
  }
  highest = block_reduce(warp_max(highest), parts, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
  for (int s = first; s <= t; s += kThreads) {
    scores[s] = expf(scores[s] - highest);
    sum += scores[s];
  }
  sum = block_reduce(warp_sum(sum), parts, [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) log_sum[blockIdx.x] = highest + logf(sum);
  float* const to = out + (head.output(t) - attention.out);
  weighted_rows(
      scores, 0, t + 1, head.width, [&](int s) { return head.value(s); },
      [&](int c, float total) { to[c] = total / sum; });
}

__global__ void __launch_bounds__(kThreads) query_gradients(Attention attention) {
  extern __shared__ float dscores[];  // (length)
  const Head head = attention.head();
  const int t = attention.token();
  for (int s = static_cast<int>(threadIdx.x); s <= t; s += kThreads)
    dscores[s] = head.score_gradient(head.probability(t, s), t, s);
  __syncthreads();
  weighted_rows(
      dscores + 1, 1, t + 1, head.width, [&](int s) { return head.key(s); },
      [&](int c, float sum) { head.query_gradient(t)[c] = head.scale * sum; });
}

__global__ void __launch_bounds__(kThreads) key_and_value_gradients(Attention attention) {
  extern __shared__ float p[];  // (length), then dscores (length); of queries s, s + 1, ...
  const Head head = attention.head();
  const int s = attention.token();
  float* const dscores = p + head.length;
  for (int t = s + static_cast<int>(threadIdx.x); t < head.length; t += kThreads) {
    p[t - s] = head.probability(t, s);
    dscores[t - s] = head.score_gradient(p[t - s], t, s);
  }
  __syncthreads();
  weighted_rows(
      p, s, head.length, head.width, [&](int t) { return head.output_gradient(t); },
      [&](int c, float sum) { head.query_gradient(s)[2 * head.out_stride + c] = sum; });
  // No position has the last token's key.
  const int owner = s > 0 ? s - 1 : head.length - 1;
  float* const dkey = head.query_gradient(owner) + head.out_stride;
  weighted_rows(
      dscores, s, head.length, head.width, [&](int t) { return head.query(t); },
      [&](int c, float sum) { dkey[c] = s > 0 ? head.scale * sum : 0.f; });
}

unsigned blocks_of(const AttentionShape& shape) {
  return static_cast<unsigned>(shape.sequences.tokens() * shape.heads);
}

size_t shared_bytes(const AttentionShape& shape, int64_t floats_a_token) {
  const auto bytes = static_cast<size_t>(shape.sequences.length * floats_a_token) * sizeof(float);
  if (bytes + kWarps * sizeof(float) > kSharedBytes)
    throw std::runtime_error("sequences of " + std::to_string(shape.sequences.length) +
                             " tokens are too long for the attention on a GPU");
  return bytes;
}

Attention attention_of(const AttentionShape& shape, const float* slopes, const float* qkv) {
  return {.slopes = slopes,
          .qkv = qkv,
          .out = nullptr,
          .log_sum = nullptr,
          .dout = nullptr,
          .dqkv = nullptr,
          .length = static_cast<int>(shape.sequences.length),
          .heads = static_cast<int>(shape.heads),
          .width = static_cast<int>(shape.head_width)};
}

}  // namespace

void attention(const AttentionShape& shape, const float* slopes, const float* qkv, float* out,
               float* log_sum) {
  Attention all = attention_of(shape, slopes, qkv);
  all.out = out, all.log_sum = log_sum;
  attend<<<blocks_of(shape), kThreads, shared_bytes(shape, 1)>>>(all, out, log_sum);
  check_launch("attend");
}

void attention_backward(const AttentionShape& shape, const float* slopes, const float* qkv,
                        const float* out, const float* log_sum, const float* dout, float* dqkv) {
  Attention all = attention_of(shape, slopes, qkv);
  all.out = out, all.log_sum = log_sum, all.dout = dout, all.dqkv = dqkv;
  query_gradients<<<blocks_of(shape), kThreads, shared_bytes(shape, 1)>>>(all);
  check_launch("query_gradients");
  key_and_value_gradients<<<blocks_of(shape), kThreads, shared_bytes(shape, 2)>>>(all);
  check_launch("key_and_value_gradients");
}

}  // namespace tilemoe::train::cuda
