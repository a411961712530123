#include <cstdio>

#include "bare_gemms.h"

namespace tilemoe::app {

void time_bare_gemms(Report&) {
  std::printf("no bare GEMMs: TILEMOE_CUDA_ARCHS of this build lacks 90a\n");
}

}  // namespace tilemoe::app
