// Stands for the GPU's operators in a build without the CUDA backend.
#include <stdexcept>

#include "train/cuda/device_operators.h"

namespace tilemoe::train {

std::unique_ptr<Operators> make_device_operators() {
  throw std::runtime_error("this build has no CUDA backend: use the CPU backend");
}

}  // namespace tilemoe::train
