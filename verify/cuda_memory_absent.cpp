// Stands for the GPU's memory in a build without the CUDA backend.
#include <stdexcept>

#include "memory.h"

namespace tilemoe::verify {

Memory& cuda_memory() {
  throw std::runtime_error("this build has no CUDA backend: use the CPU backend");
}

}  // namespace tilemoe::verify
