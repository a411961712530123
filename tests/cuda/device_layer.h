// A layer in the current GPU's memory, from logits to O and H, and to the gradients if a test needs
// them, through the public interface; all of it on the caller's stream.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tilemoe/layer.h"
#include "verify/memory.h"
#include "verify/random.h"

namespace tilemoe::test {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

struct LayerShape {
  int64_t T = 1531, d = 264, n = 200, E = 13, K = 3;
};

class DeviceLayer {
 public:
  explicit DeviceLayer(uint64_t seed, LayerShape shape = {})
      : shape_(shape),
        experts_{.device = Device::kCuda,
                 .dtype = DType::kBFloat16,
                 .d = shape.d,
                 .n = shape.n,
                 .E = shape.E},
        spec_(RoutingSpec::top_k(Device::kCuda, shape.T, shape.E, shape.K)),
        X_(memory(), DType::kBFloat16, {shape.T, shape.d}),
        W1_(memory(), DType::kBFloat16, {shape.E, 2 * shape.n, shape.d}),
        W2_(memory(), DType::kBFloat16, {shape.E, shape.d, shape.n}),
        O_(memory(), DType::kBFloat16, {shape.T, shape.d}),
        H_(memory(), DType::kBFloat16, {spec_.bound(), 2 * shape.n}),
        dO_(memory(), DType::kBFloat16, {shape.T, shape.d}),
        dX_(memory(), DType::kBFloat16, {shape.T, shape.d}),
        dW1_(memory(), DType::kBFloat16, {shape.E, 2 * shape.n, shape.d}),
        dW2_(memory(), DType::kBFloat16, {shape.E, shape.d, shape.n}),
        ds_(memory(), DType::kFloat32, {shape.T, shape.K}),
        logits_(memory(), DType::kFloat32, {shape.T, shape.E}),
        ids_(memory(), DType::kInt32, {shape.T, shape.K}),
        scores_(memory(), DType::kFloat32, {shape.T, shape.K}),
        routing_memory_(memory(), spec_.bytes()),
        routing_workspace_(memory(), spec_.workspace_bytes()),
        workspace_(memory(), std::max(experts_.workspace_bytes(spec_, Pass::kForward),
                                      experts_.workspace_bytes(spec_, BackwardMode::kWhole))),
        routing_(spec_, routing_memory_.data(), routing_memory_.bytes()),
        saved_(H_.view()) {
    write_normal(X_, seed, 1);
    write_normal(W1_, seed + 1, 1 / std::sqrt(static_cast<double>(shape.d)));
    write_normal(W2_, seed + 2, 1 / std::sqrt(static_cast<double>(shape.n)));
    write_normal(dO_, seed + 4, 1);
    write_logits(seed + 3);
    poison();
  }

  // Another routing. Waits for the default stream.
  void write_logits(uint64_t seed) { write_normal(logits_, seed, 1); }
  void poison() {
    for (auto* tensor : {&O_, &H_, &dX_, &dW1_, &dW2_, &ds_}) tensor->poison();
  }
  // top-K, routing, forward
  void enqueue(cudaStream_t stream) {
    top_k({.device = Device::kCuda,
           .K = shape_.K,
           .logits = logits_.view(),
           .ids = ids_.view(),
           .scores = scores_.view(),
           .stream = stream});
    routing_.from_top_k(ids_.view(), scores_.view(), routing_workspace_.data(),
                        routing_workspace_.bytes(), stream);
    Weights weights;
    weights.W1 = W1_.view(), weights.W2 = W2_.view();
    ForwardArgs args;
    args.routing = &routing_;
    args.weights = weights;
    args.X = X_.view(), args.O = O_.view();
    args.saved = &saved_;
    args.workspace = workspace_.data(), args.workspace_bytes = workspace_.bytes();
    args.stream = stream;
    experts_.forward(args);
  }

  // Every gradient, after enqueue().
  void enqueue_backward(cudaStream_t stream) {
    BackwardArgs args;
    args.routing = &routing_;
    args.weights.W1 = W1_.view(), args.weights.W2 = W2_.view();
    args.X = X_.view(), args.dO = dO_.view(), args.dX = dX_.view();
    args.saved = &saved_;
    args.dweights.W1 = dW1_.view(), args.dweights.W2 = dW2_.view();
    args.ds = ds_.view();
    args.workspace = workspace_.data(), args.workspace_bytes = workspace_.bytes();
    args.stream = stream;
    experts_.backward(args);
  }

  // The outputs, after everything on the device has run; poison if they were not requested.
  struct Bits {
    std::vector<std::byte> O, H, dX, dW1, dW2, ds;
    bool operator==(const Bits&) const = default;
  };
  Bits bits() const {
    check_cuda(cudaDeviceSynchronize());
    return {O_.bits(), H_.bits(), dX_.bits(), dW1_.bits(), dW2_.bits(), ds_.bits()};
  }
  // Whether every element of O was written, and nothing outside O and H.
  bool is_whole() const {
    for (const float value : O_.read())
      if (std::isnan(value)) return false;
    return O_.gaps_intact() && H_.gaps_intact() && workspace_.guards_intact() &&
           routing_memory_.guards_intact() && routing_workspace_.guards_intact();
  }

 private:
  static verify::Memory& memory() { return verify::cuda_memory(); }
  static void write_normal(verify::GuardedTensor& tensor, uint64_t seed, double scale) {
    verify::Random random(seed, 11);
    std::vector<float> values(static_cast<size_t>(tensor.elements()));
    for (float& value : values) value = static_cast<float>(scale * random.normal());
    tensor.write(values);
  }

  LayerShape shape_;
  Experts experts_;
  RoutingSpec spec_;
  verify::GuardedTensor X_, W1_, W2_, O_, H_, dO_, dX_, dW1_, dW2_, ds_, logits_, ids_, scores_;
  verify::GuardedBuffer routing_memory_, routing_workspace_, workspace_;
  Routing routing_;
  Saved saved_;
};

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace tilemoe::test
