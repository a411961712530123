#include "train/operators.h"

#include <numeric>
#include <stdexcept>

#include "train/cuda/device_operators.h"

namespace tilemoe::train {
namespace {

// A part of one of several arrays: one task.
struct Stretch {
  size_t array;
  int64_t first;
  int64_t size;
};

// size(array) elements each.
template <class Size>
std::vector<Stretch> stretches(size_t arrays, Size&& size) {
  constexpr int64_t kStretch = 32768;  // four arrays of it fit a core's second cache
  std::vector<Stretch> all;
  for (size_t array = 0; array < arrays; ++array)
    for (int64_t first = 0; first < size(array); first += kStretch)
      all.push_back({array, first, std::min(kStretch, size(array) - first)});
  return all;
}

class CpuOperators final : public Operators {
 public:
  Device device() const override { return Device::kCpu; }
  Memory& memory() override { return host_memory(); }
  DType experts_type() const override { return DType::kFloat32; }

  void clear(Floats values) override { std::fill(values.begin(), values.end(), 0.f); }
  void round(ConstFloats, uint16_t*) override { refuse_16_bits(); }
  void widen(const uint16_t*, ConstFloats, Floats) override { refuse_16_bits(); }

  void embed(Sequences sequences, ConstBytes bytes, ConstFloats table, Floats x) override {
    train::embed(sequences, bytes, table, x);
  }
  void embed_backward(Sequences sequences, ConstBytes bytes, ConstFloats dx,
                      Floats dtable) override {
    train::embed_backward(sequences, bytes, dx, dtable);
  }

  void rms_norm(ConstFloats x, ConstFloats gain, Floats y, Floats inverse_rms) override {
    train::rms_norm(x, gain, y, inverse_rms);
  }
  void rms_norm_backward(ConstFloats x, ConstFloats gain, ConstFloats inverse_rms, ConstFloats dy,
                         Floats dx, Floats dgain, Floats scratch) override {
    train::rms_norm_backward(x, gain, inverse_rms, dy, dx, dgain, scratch);
  }

  void causal_conv(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                   ConstFloats addend, Floats y) override {
    train::causal_conv(sequences, x, filter, taps, addend, y);
  }
  void causal_conv_backward(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                            ConstFloats dy, Floats dx, Floats dfilter, Floats scratch) override {
    train::causal_conv_backward(sequences, x, filter, taps, dy, dx, dfilter, scratch);
  }

  void attention(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv, Floats out,
                 Floats log_sum, Floats scratch) override {
    train::attention(shape, slopes, qkv, out, log_sum, scratch);
  }
  void attention_backward(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                          ConstFloats out, ConstFloats log_sum, ConstFloats dout, Floats dqkv,
                          Floats scratch) override {
    train::attention_backward(shape, slopes, qkv, out, log_sum, dout, dqkv, scratch);
  }

  void linear(const LinearShape& shape, ConstFloats x, ConstFloats weight, Floats y,
              Write write) override {
    train::linear(shape, x, weight, y, write);
  }
  void linear_backward_input(const LinearShape& shape, ConstFloats dy, ConstFloats weight,
                             Floats dx, Write write) override {
    train::linear_backward_input(shape, dy, weight, dx, write);
  }
  void linear_backward_weight(const LinearShape& shape, ConstFloats dy, ConstFloats x,
                              Floats dweight, Floats scratch) override {
    train::linear_backward_weight(shape, dy, x, dweight, scratch);
  }
  void add_bias(ConstFloats bias, Floats y) override { train::add_bias(bias, y); }
  void bias_gradient(ConstFloats dy, Floats dbias, Floats scratch) override {
    train::bias_gradient(dy, dbias, scratch);
  }

  void cross_entropy(ConstFloats logits, ConstBytes targets, Floats losses) override {
    train::cross_entropy(logits, targets, losses);
  }
  void cross_entropy_with_gradient(Floats logits, ConstBytes targets, float scale,
                                   Floats losses) override {
    train::cross_entropy_with_gradient(logits, targets, scale, losses);
  }

  double sum_of_squares(const std::vector<ConstFloats>& arrays) override {
    const auto parts =
        stretches(arrays.size(), [&](size_t array) { return std::ssize(arrays[array]); });
    std::vector<double> squares(parts.size());
    parallel_for(std::ssize(parts), [&](int64_t task, int) {
      const auto i = static_cast<size_t>(task);
      squares[i] =
          train::sum_of_squares(arrays[parts[i].array].data() + parts[i].first, parts[i].size);
    });
    return std::accumulate(squares.begin(), squares.end(), 0.0);
  }
  void adamw_update(const std::vector<AdamWTask>& tasks) override {
    const auto parts =
        stretches(tasks.size(), [&](size_t array) { return tasks[array].stretch.size; });
    parallel_for(std::ssize(parts), [&](int64_t task, int) {
      const Stretch& part = parts[static_cast<size_t>(task)];
      const AdamWStretch& whole = tasks[part.array].stretch;
      train::adamw_update({.size = part.size,
                           .gradient = whole.gradient + part.first,
                           .value = whole.value + part.first,
                           .mean = whole.mean + part.first,
                           .square = whole.square + part.first},
                          tasks[part.array].factors);
    });
  }

 private:
  [[noreturn]] static void refuse_16_bits() {
    throw std::logic_error("the experts of a CPU compute in float32");
  }
};

}  // namespace

Operators& cpu_operators() {
  static CpuOperators operators;
  return operators;
}

std::unique_ptr<Operators> make_operators(Device device) {
  if (device == Device::kCuda) return make_device_operators();
  return std::make_unique<CpuOperators>();
}

}  // namespace tilemoe::train
