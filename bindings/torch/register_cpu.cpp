#include "register.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe_torch {
namespace {

int64_t version() {
  return tilemoe_version_number();
}

}  // namespace
}  // namespace tilemoe_torch

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CPU, m) {
  tilemoe_torch::register_operators(m);
}

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CompositeExplicitAutograd, m) {
  m.impl("version", TORCH_BOX(&tilemoe_torch::version));
}
