#pragma once

#include "report.h"

namespace tilemoe::app {

// What the tensor cores give by mma.sync and by wgmma with nothing around the GEMM, and the clock
// at which they ran. Without code for an H100 it prints only that.
void time_bare_gemms(Report& report);

}  // namespace tilemoe::app
