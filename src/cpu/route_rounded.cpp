// Token rounding.
#include "check.h"
#include "cpu/backend.h"

namespace tilemoe::cpu {

void CpuBackend::route_rounded(tilemoe_routing&, const tilemoe_route_rounded_args&) {
  TILEMOE_CHECK_SUPPORTED(false, "token rounding is not built yet");
}

}  // namespace tilemoe::cpu
