// The experts' forward pass on a GPU, for a trainer whose tensors are float32 on the CPU: each call
// copies X, the weights and the routing in, as bfloat16, and O and H out.
#pragma once

#include <memory>
#include <vector>

#include "tilemoe/layer.h"
#include "train/ops/tasks.h"

namespace tilemoe::train {

class DeviceExperts {
 public:
  // Takes the memory that a forward of any of these sizes needs. `experts` and `sizes` are those of
  // the CPU. Throws std::runtime_error in a build without the CUDA backend.
  DeviceExperts(const Experts& experts, const std::vector<RoutingSpec>& sizes);
  ~DeviceExperts();

  // O (T, d), the sum over a token's experts; H (capacity, 2n), its first M rows, where it is not
  // empty. `routing` is on the CPU.
  void forward(const Routing& routing,
               ConstFloats X,   // (T, d)
               ConstFloats W1,  // (E, 2n, d)
               ConstFloats W2,  // (E, d, n)
               Floats O, Floats H);

 private:
  struct Device;
  std::unique_ptr<Device> device_;
};

}  // namespace tilemoe::train
