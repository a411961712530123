// One layer on a device, with random data of a case's shape. Logits are given: the router's GEMM is
// the application's.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "core/backend.h"
#include "tilemoe/layer.h"
#include "timed_weights.h"
#include "verify/case.h"
#include "verify/memory.h"

namespace tilemoe::app {

// Names of the steps around the layer.
namespace step {
using namespace tilemoe::step;
inline constexpr const char* top_k = "top_k";
inline constexpr const char* route = "route";
inline constexpr const char* pack_lora = "pack_lora";
inline constexpr const char* router_backward = "router_backward";
}  // namespace step

// Parts of one allocation. Without memory it only counts.
class Arena {
 public:
  explicit Arena(void* memory = nullptr) : memory_(static_cast<std::byte*>(memory)) {}
  void* take(size_t bytes);
  Tensor take(DType dtype, std::initializer_list<int64_t> shape);
  size_t bytes() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

// Memory of a device; released with its last copy.
std::shared_ptr<void> allocate(verify::Memory& memory, size_t bytes);

// scale * N(0, 1): a random block of a prime number of elements, repeated. `seed` shifts it.
void fill_normal(verify::Memory& memory, const Tensor& tensor, double scale, int64_t seed);
// Logits of a case's load.
void fill_logits(verify::Memory& memory, const Tensor& logits, verify::Load load);

struct TimedTensors {
  TimedTensors(const verify::Case& layer, Device device, Arena& arena);

  Tensor X, O, dO, dX, H;
  // W1, W1_up and W2 unless quantised; the up tensors if split; gradients if wanted.
  Tensor W1, W1_up, W2, b1, b1_up, b2, dW1, dW1_up, dW2, db1, db1_up, db2;
  Tensor logits, ids, scores, ds, dlogits;
  LoraGradients lora, dlora;  // the factors of adapters, and their gradients
  Tensor P1, P2;
  size_t routing_bytes, routing_workspace_bytes, workspace_bytes, packed_lora_bytes;
  void *routing, *routing_workspace, *workspace, *packed_lora;
};

class TimedLayer {
 public:
  // The bytes of the device's memory. Throws std::runtime_error if the case is not one to be timed.
  static size_t bytes(const verify::Case& layer, Device device);

  TimedLayer(const verify::Case& layer, Device device);

  // Top-K, routing, packing of adapters and the library's forward; an observer sees each step.
  void forward(StepObserver* observer = nullptr);
  // The library's backward, then the router's; after a forward.
  void backward(StepObserver* observer = nullptr);

  const verify::Case& layer() const { return case_; }
  const Experts& experts() const { return experts_; }
  const Routing& routing() const { return *routing_; }
  const TimedTensors& tensors() const { return *tensors_; }
  verify::Memory& memory() const { return memory_; }
  int64_t rows() const;  // M of the last forward

 private:
  void route(StepObserver* observer);
  void pack_lora(StepObserver* observer);
  Weights weights() const;

  verify::Case case_;
  verify::Memory& memory_;
  Experts experts_;
  std::shared_ptr<void> allocation_;
  std::optional<TimedTensors> tensors_;
  std::optional<Routing> routing_;
  std::optional<TimedWeights> quantized_;
  Saved saved_;
  tilemoe_packed_lora packed_lora_{};
};

}  // namespace tilemoe::app
