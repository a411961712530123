#include "namespace.h"
#include "register.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe_torch {
namespace {

int64_t version() {
  return tilemoe_version_number();
}

}  // namespace
}  // namespace tilemoe_torch

TILEMOE_TORCH_LIBRARY_IMPL(TILEMOE_TORCH_NAMESPACE, CPU, m) {
  tilemoe_torch::register_operators(m);
}

TILEMOE_TORCH_LIBRARY_IMPL(TILEMOE_TORCH_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("version", TORCH_BOX(&tilemoe_torch::version));
}
