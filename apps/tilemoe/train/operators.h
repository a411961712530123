// The operators that a model is made of, on one device. Their spans lie in that device's memory,
// and each does what the function of its name in ops/ says; the CPU's are those functions. Work on
// a GPU goes to the default stream: copies wait for it, nothing else does.
#pragma once

#include <memory>
#include <vector>

#include "tilemoe/tensor.h"
#include "train/memory.h"
#include "train/ops/adamw_update.h"
#include "train/ops/attention.h"
#include "train/ops/causal_conv.h"
#include "train/ops/cross_entropy.h"
#include "train/ops/embedding.h"
#include "train/ops/linear.h"
#include "train/ops/rms_norm.h"

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
  // What the experts compute in; all else is float32.
  virtual DType experts_type() const = 0;

  virtual void clear(Floats values) = 0;
  // For experts that compute in bfloat16: to it, to nearest even; and back, to = from + addend,
  // which may be empty.
  virtual void round(ConstFloats from, uint16_t* to) = 0;
  virtual void widen(const uint16_t* from, ConstFloats addend, Floats to) = 0;

  virtual void embed(Sequences sequences, ConstBytes bytes, ConstFloats table, Floats x) = 0;
  virtual void embed_backward(Sequences sequences, ConstBytes bytes, ConstFloats dx,
                              Floats dtable) = 0;

  virtual void rms_norm(ConstFloats x, ConstFloats gain, Floats y, Floats inverse_rms) = 0;
  virtual void rms_norm_backward(ConstFloats x, ConstFloats gain, ConstFloats inverse_rms,
                                 ConstFloats dy, Floats dx, Floats dgain, Floats scratch) = 0;

  virtual void causal_conv(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                           ConstFloats addend, Floats y) = 0;
  virtual void causal_conv_backward(Sequences sequences, ConstFloats x, ConstFloats filter,
                                    int64_t taps, ConstFloats dy, Floats dx, Floats dfilter,
                                    Floats scratch) = 0;

  virtual void attention(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                         Floats out, Floats log_sum, Floats scratch) = 0;
  virtual void attention_backward(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                                  ConstFloats out, ConstFloats log_sum, ConstFloats dout,
                                  Floats dqkv, Floats scratch) = 0;

  virtual void linear(const LinearShape& shape, ConstFloats x, ConstFloats weight, Floats y,
                      Write write = Write::kStore) = 0;
  virtual void linear_backward_input(const LinearShape& shape, ConstFloats dy, ConstFloats weight,
                                     Floats dx, Write write = Write::kStore) = 0;
  virtual void linear_backward_weight(const LinearShape& shape, ConstFloats dy, ConstFloats x,
                                      Floats dweight, Floats scratch) = 0;
  virtual void add_bias(ConstFloats bias, Floats y) = 0;
  virtual void bias_gradient(ConstFloats dy, Floats dbias, Floats scratch) = 0;

  virtual void cross_entropy(ConstFloats logits, ConstBytes targets, Floats losses) = 0;
  virtual void cross_entropy_with_gradient(Floats logits, ConstBytes targets, float scale,
                                           Floats losses) = 0;

  // Of all arrays together, in an order that their sizes alone decide.
  virtual double sum_of_squares(const std::vector<ConstFloats>& arrays) = 0;
  virtual void adamw_update(const std::vector<AdamWTask>& tasks) = 0;
};

Operators& cpu_operators();
// Throws std::runtime_error with the reason where this build or machine has none for the device.
std::unique_ptr<Operators> make_operators(Device device);

}  // namespace tilemoe::train
