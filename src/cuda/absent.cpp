// Stands for the CUDA backend in a build without it.
#include "check.h"
#include "cuda/backend.h"

namespace tilemoe::cuda {

Backend& backend() {
  TILEMOE_CHECK_SUPPORTED(false, "this build has no CUDA backend: use the CPU backend");
}

}  // namespace tilemoe::cuda
