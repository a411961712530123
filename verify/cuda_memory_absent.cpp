// Stands for the GPU's memory in a build without the CUDA backend.
#include <stdexcept>

#include "memory.h"

namespace tilemoe::verify {

Memory& cuda_memory() {
  throw std::runtime_error(
      "TileMoE was built without CUDA; install the CUDA wheel or rebuild with TILEMOE_CUDA=ON");
}

}  // namespace tilemoe::verify
