#include "cuda/gpu_machine.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "bench_memory.h"
#include "cuda/cublaslt.h"
#include "cuda/device.h"

namespace tilemoe::app {
namespace {

// Each product by the fastest algorithm, tried on the first call's operands.
class Product {
 public:
  explicit Product(const DenseShape& shape) : product_(shape) {}
  void run(const Tensor& A, const Tensor& B, const Tensor& C) {
    if (!chosen_) product_.choose(A.data, B.data, C.data, DeviceCacheFlush());
    chosen_ = true;
    product_.run(A.data, B.data, C.data);
  }

 private:
  LtProduct product_;
  bool chosen_ = false;
};

class GpuRouter final : public RouterProducts {
 public:
  GpuRouter(const verify::Case& layer, bool with_backward)
      : logits_({.M = layer.T,
                 .N = layer.E,
                 .K = layer.d,
                 .B_transposed = true,
                 .operands = layer.dtype,
                 .result = layer.dtype}) {
    if (!with_backward) return;
    dX_.emplace(DenseShape{
        .M = layer.T, .N = layer.d, .K = layer.E, .operands = layer.dtype, .result = layer.dtype});
    dWr_.emplace(DenseShape{.M = layer.E,
                            .N = layer.d,
                            .K = layer.T,
                            .A_transposed = true,
                            .operands = layer.dtype,
                            .result = layer.dtype});
  }

  void forward(const Tensor& X, const Tensor& Wr, const Tensor& logits) override {
    logits_.run(X, Wr, logits);
  }
  void backward(const Tensor& dlogits, const Tensor& X, const Tensor& Wr, const Tensor& dX,
                const Tensor& dWr) override {
    dX_->run(dlogits, Wr, dX);
    dWr_->run(dlogits, X, dWr);
  }

 private:
  Product logits_;
  std::optional<Product> dX_, dWr_;
};

class GpuMachine final : public BenchMachine {
 public:
  verify::Memory& memory() const override { return verify::cuda_memory(); }
  size_t available_memory() const override {
    size_t available = 0, all = 0;
    check_cuda(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
    return available;
  }
  // One random block of a prime number of elements, over and over: no two rows begin at the same
  // place of it.
  void fill_normal(DType dtype, void* to, int64_t elements, double scale,
                   uint64_t seed) const override {
    constexpr int64_t kBlock = 4194301;
    const size_t all = size_of(dtype) * static_cast<size_t>(elements);
    const int64_t drawn = std::min(kBlock, elements);
    std::vector<std::byte> block(size_of(dtype) * static_cast<size_t>(drawn));
    app::fill_normal(dtype, block.data(), drawn, scale, seed);
    memory().copy_in(to, block.data(), block.size());
    for (size_t have = block.size(); have < all; have *= 2)
      check_cuda(cudaMemcpy(static_cast<std::byte*>(to) + have, to, std::min(have, all - have),
                            cudaMemcpyDeviceToDevice),
                 "a copy on the GPU");
  }
  std::unique_ptr<RouterProducts> router(const verify::Case& layer,
                                         bool with_backward) const override {
    return std::make_unique<GpuRouter>(layer, with_backward);
  }
};

}  // namespace

const BenchMachine& gpu_machine() {
  static const GpuMachine machine;
  return machine;
}

}  // namespace tilemoe::app
