// Stands for the experts on a GPU in a build without the CUDA backend.
#include <stdexcept>

#include "train/cuda/device_experts.h"

namespace tilemoe::train {

struct DeviceExperts::Device {};

DeviceExperts::DeviceExperts(const Experts&, const std::vector<RoutingSpec>&) {
  throw std::runtime_error("this build has no CUDA backend: use the CPU backend");
}
DeviceExperts::~DeviceExperts() = default;
void DeviceExperts::forward(const Routing&, ConstFloats, ConstFloats, ConstFloats, Floats, Floats) {
}

}  // namespace tilemoe::train
