// The plan of a call of the layer, made before it writes or launches anything (cuda/plan.h): its device,
// its arch and the kernels of its projections.
#pragma once

#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/core/device.h"
#include "cuda/core/variant.h"

namespace tilemoe::cuda {

// The kernel of a projection, and the columns of the block that it was chosen for.
struct ProjectionPlan {
  Kernel kernel = nullptr;
  int64_t columns = 0;
};

struct ExpertsPlan {
  const DeviceInfo* device;
  ArchName arch;
  ProjectionPlan up_projection = {}, down_projection = {}, activation_gradient = {};
  ProjectionPlan input_gradient[2] = {};  // the second if dH lies over H
};

// The device of a step: its call's, or the current one if the step is no part of a call.
inline const DeviceInfo& device_of(const ExpertsPlan* plan) {
  return plan ? *plan->device : current_device();
}

}  // namespace tilemoe::cuda
