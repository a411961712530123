// The operators of the CPU; each file of this folder defines those of its name.
#pragma once

#include <stdexcept>

#include "train/operators.h"

namespace tilemoe::train {

class CpuOperators final : public Operators {
 public:
  Device device() const override { return Device::kCpu; }
  Memory& memory() override { return host_memory(); }
  DType experts_type() const override { return DType::kFloat32; }

  void clear(Floats values) override { std::fill(values.begin(), values.end(), 0.f); }
  void round(ConstFloats, uint16_t*) override { refuse_16_bits(); }
  void widen(const uint16_t*, ConstFloats, Floats) override { refuse_16_bits(); }
  void embed(Sequences sequences, ConstBytes bytes, ConstFloats table, Floats x) override;
  void embed_backward(Sequences sequences, ConstBytes bytes, ConstFloats dx,
                      Floats dtable) override;
  void rms_norm(ConstFloats x, ConstFloats gain, Floats y, Floats inverse_rms) override;
  void rms_norm_backward(ConstFloats x, ConstFloats gain, ConstFloats inverse_rms, ConstFloats dy,
                         Floats dx, Floats dgain, Floats scratch) override;
  void causal_conv(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                   ConstFloats addend, Floats y) override;
  void causal_conv_backward(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                            ConstFloats dy, Floats dx, Floats dfilter, Floats scratch) override;
  void attention(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv, Floats out,
                 Floats log_sum, Floats scratch) override;
  void attention_backward(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                          ConstFloats out, ConstFloats log_sum, ConstFloats dout, Floats dqkv,
                          Floats scratch) override;
  void linear(const LinearShape& shape, ConstFloats x, ConstFloats weight, Floats y,
              Write write) override;
  void linear_backward_input(const LinearShape& shape, ConstFloats dy, ConstFloats weight,
                             Floats dx, Write write) override;
  void linear_backward_weight(const LinearShape& shape, ConstFloats dy, ConstFloats x,
                              Floats dweight, Floats scratch) override;
  void add_bias(ConstFloats bias, Floats y) override;
  void bias_gradient(ConstFloats dy, Floats dbias, Floats scratch) override;
  void cross_entropy(ConstFloats logits, ConstBytes targets, Floats losses) override;
  void cross_entropy_with_gradient(Floats logits, ConstBytes targets, float scale,
                                   Floats losses) override;
  double sum_of_squares(const std::vector<ConstFloats>& arrays) override;
  void adamw_update(const std::vector<AdamWTask>& tasks) override;

 private:
  [[noreturn]] static void refuse_16_bits() {
    throw std::logic_error("the experts of a CPU compute in float32");
  }
};

}  // namespace tilemoe::train
