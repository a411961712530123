// The modes of tilemoe_kernels.
#pragma once

#include <functional>
#include <vector>

#include "report.h"
#include "verify/case.h"

namespace tilemoe::app {

struct Request {
  Device device = Device::kCpu;
  std::vector<verify::Case> layers;
  int rounds = 15;
  bool forward = true, backward = true;  // the passes whose steps are timed
};

// Each step of the layers.
void time_steps(const Request& request, Report& report);
// The kernels of routing: top-K, the routing from its pairs, token rounding, groups of experts.
void time_routing(const Request& request, Report& report);
// On a GPU: every tile configuration of the GEMMs that have several, and the cost model's pick.
// False if a pick takes over 3 % longer than the fastest.
bool compare_configurations(const Request& request, Report& report);
// On a GPU: forward of quantised layers, with GEMMs that read codes and without.
void time_codes(const Request& request, Report& report);
// On a GPU: GEMMs without anything around them, by mma.sync and wgmma; and the layers' GEMMs by
// cuBLASLt, as dense ones.
void time_gemms(const Request& request, Report& report);

// The first of them; the build has it for an H100's architecture alone.
void time_bare_gemms(Report& report);

// On a GPU: the rate of a square GEMM of bfloat16 by cuBLASLt, and of a copy, whose bytes are read
// and written. Throws std::runtime_error if cuBLASLt or memory is missing.
Limits measured_limits();

// "T=..., d=..., ..." and the same as values.
std::string shape_text(const verify::Case& layer);
Values shape_values(const verify::Case& layer);

}  // namespace tilemoe::app
