// Stands for the CUDA backend in a build without it.
#include <cstring>

#include "core/check.h"
#include "cuda/cuda_backend.h"

namespace tilemoe::cuda {

const Backend& backend() {
  TILEMOE_CHECK_SUPPORTED(
      false,
      "TileMoE was built without CUDA; install the CUDA wheel or rebuild with TILEMOE_CUDA=ON");
}

const Backend& backend_of_build() {
  return backend();
}

void set_arch(const char* name) {
  TILEMOE_CHECK_SUPPORTED(name == nullptr || std::strcmp(name, "auto") == 0,
                          "TileMoE was built without CUDA and has no arch '" << name << "'");
}

std::string describe_arch() {
  backend();
  return {};
}

}  // namespace tilemoe::cuda
