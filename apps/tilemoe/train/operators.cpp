#include "train/operators.h"

#include "train/cuda/device_operators.h"
#include "train/ops/cpu_operators.h"

namespace tilemoe::train {

Operators& cpu_operators() {
  static CpuOperators operators;
  return operators;
}

std::unique_ptr<Operators> make_operators(Device device) {
  if (device == Device::kCuda) return make_device_operators();
  return std::make_unique<CpuOperators>();
}

}  // namespace tilemoe::train
