#include "namespace.h"
#include "register.h"

TILEMOE_TORCH_LIBRARY_IMPL(TILEMOE_TORCH_NAMESPACE, CPU, m) {
  tilemoe_torch::register_operators(m);
}
