#include "call.h"
#include "register.h"

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CUDA, m) {
  tilemoe_torch::register_operators(m);
}

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CompositeExplicitAutograd, m) {
  m.impl("set_block_turns", TORCH_BOX(&tilemoe_torch::set_block_turns));
}
