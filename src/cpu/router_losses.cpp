// The balance loss and the router's z-loss.
#include "check.h"
#include "cpu/backend.h"

namespace tilemoe::cpu {

size_t CpuBackend::router_losses_scratch_bytes(int64_t, int64_t) const {
  return 0;
}

void CpuBackend::router_losses(const tilemoe_router_losses_args&) {
  TILEMOE_CHECK_SUPPORTED(false, "the router's losses are not built yet");
}

}  // namespace tilemoe::cpu
