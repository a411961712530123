#include "register.h"

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CPU, m) {
  tilemoe_torch::register_operators(m);
}
