// Stands for the GPU's operators in a build without the CUDA backend.
#include <stdexcept>

#include "train/cuda/device_operators.h"

namespace tilemoe::train {

std::unique_ptr<Operators> make_device_operators() {
  throw std::runtime_error(
      "TileMoE was built without CUDA; install the CUDA wheel or rebuild with TILEMOE_CUDA=ON");
}

}  // namespace tilemoe::train
