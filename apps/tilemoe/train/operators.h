// The operators that a model is made of, on one device. Their spans lie in that device's memory.
// Work on a GPU goes to the default stream: copies wait for it, nothing else does. `scratch` has the
// floats of the function of that name in ops/shapes.h.
#pragma once

#include <memory>
#include <vector>

#include "tilemoe/tensor.h"
#include "train/memory.h"
#include "train/ops/shapes.h"

namespace tilemoe::train {

struct AdamWTask {
  AdamWStretch stretch;  // a whole parameter
  AdamWFactors factors;
};

class Operators {
 public:
  virtual ~Operators() = default;
  virtual Device device() const = 0;
  virtual Memory& memory() = 0;
  // The type that the experts compute in; all else is float32.
  virtual DType experts_type() const = 0;

  virtual void clear(Floats values) = 0;
  // For experts that compute in bfloat16: to it, to nearest even; and back, to = from + addend,
  // which may be empty.
  virtual void round(ConstFloats from, uint16_t* to) = 0;
  virtual void widen(const uint16_t* from, ConstFloats addend, Floats to) = 0;

  // A token's vector from its byte and the bytes before it: x_t = sum over j < W of row byte(t - j)
  // of table j. Each sequence comes with the W - 1 bytes before it: bytes (sequences, W - 1 +
  // length), table and dtable (W, 256, d), x and dx (T, d).
  virtual void embed(Sequences sequences, ConstBytes bytes, ConstFloats table, Floats x) = 0;
  virtual void embed_backward(Sequences sequences, ConstBytes bytes, ConstFloats dx,
                              Floats dtable) = 0;

  // Root-mean-square normalisation (arXiv 1910.07467): y = gain * x / sqrt(mean(x^2) + 1e-6), row by
  // row; inverse_rms (T) is for the backward, which adds to dx.
  virtual void rms_norm(ConstFloats x, ConstFloats gain, Floats y, Floats inverse_rms) = 0;
  virtual void rms_norm_backward(ConstFloats x, ConstFloats gain, ConstFloats inverse_rms,
                                 ConstFloats dy, Floats dx, Floats dgain, Floats scratch) = 0;

  // A short causal convolution, one filter a channel: y(t) = addend(t) + sum over j of w_j * x(t - j),
  // within each sequence; what would lie before a sequence is zero. filter (taps, d), the current
  // token's tap first; the backward adds to dx.
  virtual void causal_conv(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                           ConstFloats addend, Floats y) = 0;
  virtual void causal_conv_backward(Sequences sequences, ConstFloats x, ConstFloats filter,
                                    int64_t taps, ConstFloats dy, Floats dx, Floats dfilter,
                                    Floats scratch) = 0;

  // Causal attention within each sequence. Token t sees tokens s <= t, and
  //   p(t, s) = softmax over s of <q_t, k_s> / sqrt(w) - slope_h (t - s),
  // where k_s comes from the token BEFORE s and the value from s itself: a head can look up what
  // followed earlier occurrences of the current token. The first token of a sequence has k = 0. The
  // penalty on distance is ALiBi's (arXiv 2108.12409). Scores are never stored: the backward makes
  // them again from the logarithm of each row's sum (arXiv 2205.14135). slopes (heads); qkv and dqkv
  // (T, 3D): queries, keys, values, head by head; out and dout (T, D); log_sum (sequences, heads,
  // length); scratch (workers, attention_worker_scratch).
  virtual void attention(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                         Floats out, Floats log_sum, Floats scratch) = 0;
  virtual void attention_backward(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                                  ConstFloats out, ConstFloats log_sum, ConstFloats dout,
                                  Floats dqkv, Floats scratch) = 0;

  // A linear map without bias, y = x W^T, and its gradients; weight and dweight (out, in).
  virtual void linear(const LinearShape& shape, ConstFloats x, ConstFloats weight, Floats y,
                      Write write = Write::kStore) = 0;
  virtual void linear_backward_input(const LinearShape& shape, ConstFloats dy, ConstFloats weight,
                                     Floats dx, Write write = Write::kStore) = 0;
  virtual void linear_backward_weight(const LinearShape& shape, ConstFloats dy, ConstFloats x,
                                      Floats dweight, Floats scratch) = 0;
  // y += bias, row by row; dbias = sum of dy's rows.
  virtual void add_bias(ConstFloats bias, Floats y) = 0;
  virtual void bias_gradient(ConstFloats dy, Floats dbias, Floats scratch) = 0;

  // The loss of the next byte, in nats: logits (T, 256), targets and losses (T). The second leaves
  // in place of the logits the gradient of scale * sum of losses.
  virtual void cross_entropy(ConstFloats logits, ConstBytes targets, Floats losses) = 0;
  virtual void cross_entropy_with_gradient(Floats logits, ConstBytes targets, float scale,
                                           Floats losses) = 0;

  // The sum over all arrays, in an order that their sizes alone decide.
  virtual double sum_of_squares(const std::vector<ConstFloats>& arrays) = 0;
  virtual void adamw_update(const std::vector<AdamWTask>& tasks) = 0;
};

Operators& cpu_operators();
// Throws std::runtime_error with the reason if this build or machine has none for the device.
std::unique_ptr<Operators> make_operators(Device device);

}  // namespace tilemoe::train
