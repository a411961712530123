#include <algorithm>
#include <climits>

#include "call.h"
#include "register.h"

namespace tilemoe_torch {
namespace {

void set_block_turns(int64_t turns) {
  constexpr int64_t kLeast = INT_MIN, kMost = INT_MAX;
  check(tilemoe_set_block_turns(static_cast<int>(std::clamp(turns, kLeast, kMost))));
}

}  // namespace
}  // namespace tilemoe_torch

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CUDA, m) {
  tilemoe_torch::register_operators(m);
}

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CompositeExplicitAutograd, m) {
  m.impl("set_block_turns", TORCH_BOX(&tilemoe_torch::set_block_turns));
}
