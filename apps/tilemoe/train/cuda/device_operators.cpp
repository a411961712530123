#include "train/cuda/device_operators.h"

#include <map>
#include <numeric>
#include <tuple>

#include "cuda/cublaslt.h"
#include "cuda/device.h"
#include "train/cuda/kernels.h"

namespace tilemoe::train {
namespace {

using app::check_cuda;

class DeviceMemory final : public Memory {
 public:
  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, std::max(bytes, size_t{1})), "cudaMalloc");
    check_cuda(cudaMemset(memory, 0, bytes), "cudaMemset");
    return memory;
  }
  void release(void* memory) override { cudaFree(memory); }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    check_cuda(cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice), "a copy to the GPU");
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    check_cuda(cudaMemcpy(to_host, from, bytes, cudaMemcpyDeviceToHost), "a copy from the GPU");
  }
  std::optional<double> available() const override {
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<double>(free);
  }
};

// Arrays outlive the operators that made them.
DeviceMemory& device_memory() {
  static DeviceMemory memory;
  return memory;
}

// The GEMMs of a model by cuBLASLt, each by the first algorithm that its heuristics name: the
// same on every run.
class Gemms {
 public:
  void run(const app::DenseShape& shape, const float* A, const float* B, float* C) {
    const auto key = std::tuple(shape.M, shape.N, shape.K, shape.A_transposed, shape.B_transposed,
                                shape.accumulate);
    gemms_.try_emplace(key, shape).first->second.run(A, B, C);
  }

 private:
  std::map<std::tuple<int64_t, int64_t, int64_t, bool, bool, bool>, app::LtGemm> gemms_;
};

class DeviceOperators final : public Operators {
 public:
  Device device() const override { return Device::kCuda; }
  Memory& memory() override { return device_memory(); }
  DType experts_type() const override { return DType::kBFloat16; }

  void clear(Floats values) override {
    check_cuda(cudaMemsetAsync(values.data(), 0, values.size_bytes()), "cudaMemsetAsync");
  }
  void round(ConstFloats from, uint16_t* to) override {
    cuda::round_to_bfloat16(from.data(), to, std::ssize(from));
  }
  void widen(const uint16_t* from, ConstFloats addend, Floats to) override {
    cuda::widen_bfloat16(from, addend.data(), to.data(), std::ssize(to));
  }

  void embed(Sequences sequences, ConstBytes bytes, ConstFloats table, Floats x) override {
    cuda::embed(sequences, tables(sequences, bytes), bytes.data(), table.data(), x.data(),
                std::ssize(x) / sequences.tokens());
  }
  void embed_backward(Sequences sequences, ConstBytes bytes, ConstFloats dx,
                      Floats dtable) override {
    cuda::embed_backward(sequences, tables(sequences, bytes), bytes.data(), dx.data(),
                         dtable.data(), std::ssize(dx) / sequences.tokens());
  }

  void rms_norm(ConstFloats x, ConstFloats gain, Floats y, Floats inverse_rms) override {
    cuda::rms_norm(x.data(), gain.data(), y.data(), inverse_rms.data(), std::ssize(inverse_rms),
                   std::ssize(gain));
  }
  void rms_norm_backward(ConstFloats x, ConstFloats gain, ConstFloats inverse_rms, ConstFloats dy,
                         Floats dx, Floats dgain, Floats scratch) override {
    cuda::rms_norm_backward(x.data(), gain.data(), inverse_rms.data(), dy.data(), dx.data(),
                            dgain.data(), scratch.data(), std::ssize(inverse_rms),
                            std::ssize(gain));
  }

  void causal_conv(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                   ConstFloats addend, Floats y) override {
    cuda::causal_conv(sequences, x.data(), filter.data(), taps, addend.data(), y.data(),
                      std::ssize(filter) / taps);
  }
  void causal_conv_backward(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                            ConstFloats dy, Floats dx, Floats dfilter, Floats scratch) override {
    cuda::causal_conv_backward(sequences, x.data(), filter.data(), taps, dy.data(), dx.data(),
                               dfilter.data(), scratch.data(), std::ssize(filter) / taps);
  }

  void attention(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv, Floats out,
                 Floats log_sum, Floats) override {
    cuda::attention(shape, slopes.data(), qkv.data(), out.data(), log_sum.data());
  }
  void attention_backward(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                          ConstFloats out, ConstFloats log_sum, ConstFloats dout, Floats dqkv,
                          Floats) override {
    cuda::attention_backward(shape, slopes.data(), qkv.data(), out.data(), log_sum.data(),
                             dout.data(), dqkv.data());
  }

  void linear(const LinearShape& shape, ConstFloats x, ConstFloats weight, Floats y,
              Write write) override {
    gemms_.run({.M = shape.rows,
                .N = shape.out,
                .K = shape.in,
                .B_transposed = true,
                .operands = DType::kFloat32,
                .result = DType::kFloat32,
                .accumulate = write == Write::kAdd},
               x.data(), weight.data(), y.data());
  }
  void linear_backward_input(const LinearShape& shape, ConstFloats dy, ConstFloats weight,
                             Floats dx, Write write) override {
    gemms_.run({.M = shape.rows,
                .N = shape.in,
                .K = shape.out,
                .operands = DType::kFloat32,
                .result = DType::kFloat32,
                .accumulate = write == Write::kAdd},
               dy.data(), weight.data(), dx.data());
  }
  void linear_backward_weight(const LinearShape& shape, ConstFloats dy, ConstFloats x,
                              Floats dweight, Floats) override {
    gemms_.run({.M = shape.out,
                .N = shape.in,
                .K = shape.rows,
                .A_transposed = true,
                .operands = DType::kFloat32,
                .result = DType::kFloat32},
               dy.data(), x.data(), dweight.data());
  }
  void add_bias(ConstFloats bias, Floats y) override {
    cuda::add_bias(bias.data(), y.data(), std::ssize(y) / std::ssize(bias), std::ssize(bias));
  }
  void bias_gradient(ConstFloats dy, Floats dbias, Floats scratch) override {
    cuda::bias_gradient(dy.data(), dbias.data(), scratch.data(), std::ssize(dy) / std::ssize(dbias),
                        std::ssize(dbias));
  }

  void cross_entropy(ConstFloats logits, ConstBytes targets, Floats losses) override {
    cuda::cross_entropy(logits.data(), targets.data(), 0, nullptr, losses.data(),
                        std::ssize(targets));
  }
  void cross_entropy_with_gradient(Floats logits, ConstBytes targets, float scale,
                                   Floats losses) override {
    cuda::cross_entropy(logits.data(), targets.data(), scale, logits.data(), losses.data(),
                        std::ssize(targets));
  }

  double sum_of_squares(const std::vector<ConstFloats>& arrays) override {
    int64_t parts = 0;
    for (const ConstFloats array : arrays) parts += cuda::square_parts(std::ssize(array));
    if (squares_.size() < parts) squares_ = Array<double>(parts, memory());
    parts = 0;
    for (const ConstFloats array : arrays) {
      cuda::sum_of_squares(array.data(), std::ssize(array), squares_.data() + parts);
      parts += cuda::square_parts(std::ssize(array));
    }
    const std::vector<double> sums = squares_.read_first(parts);
    return std::accumulate(sums.begin(), sums.end(), 0.0);
  }
  void adamw_update(const std::vector<AdamWTask>& tasks) override {
    for (const AdamWTask& task : tasks) cuda::adamw_update(task.stretch, task.factors);
  }

 private:
  // W: each sequence comes with the W - 1 bytes before it.
  static int64_t tables(Sequences sequences, ConstBytes bytes) {
    return std::ssize(bytes) / sequences.count - sequences.length + 1;
  }

  Gemms gemms_;
  Array<double> squares_;
};

}  // namespace

std::unique_ptr<Operators> make_device_operators() {
  return std::make_unique<DeviceOperators>();
}

}  // namespace tilemoe::train
