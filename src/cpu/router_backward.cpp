// From ds to the logits.
#include "check.h"
#include "cpu/backend.h"
#include "cpu/routing_scratch.h"

namespace tilemoe::cpu {

size_t CpuBackend::routing_scratch_bytes(const tilemoe_routing_spec& spec) const {
  return SortScratch(spec, nullptr).bytes;
}

void CpuBackend::router_backward(const tilemoe_router_backward_args&) {
  TILEMOE_CHECK_SUPPORTED(false, "the router's backward is not built yet");
}

}  // namespace tilemoe::cpu
