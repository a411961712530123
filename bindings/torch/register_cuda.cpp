#include "register.h"

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CUDA, m) {
  tilemoe_torch::register_operators(m);
}
