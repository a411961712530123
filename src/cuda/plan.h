// Makes the plan of a call of the layer, where its arguments are checked. Forward and backward of a
// layer share a plan: they find it again by its key.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/core/experts_plan.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/variant.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {

// Throws Error(kUnsupported) if no GEMM kernel takes the experts' dtype.
void check_dtype(const tilemoe_experts& experts);

// The plan of a call. Throws Error(kUnsupported) if its GEMMs have no kernel on the current device,
// and Error(kInvalidArgument) for an environment variable with an unknown value.
std::shared_ptr<const ExpertsPlan> plan_for(const PlanRequest& request);

// The arch of a step: its call's, or that of the current device if the step is no part of a call.
ArchName arch_of(const ExpertsPlan* plan);

// The kernel of a step: its call's, the one of the tile that the step requests, or the one that the
// cost model chooses.
Kernel kernel_of(const UpProjection& step);
Kernel kernel_of(const DownProjection& step);
Kernel kernel_of(const ActivationGradient& step);
Kernel kernel_of(const InputGradient& step);
Kernel kernel_of(const WeightGradient& step);  // of the tile that its columns take
Kernel kernel_of(const LoraProjection& step);  // the only one of its key

// Which kernels a step chooses from.
KernelKey key_of(const UpProjection& step);
KernelKey key_of(const DownProjection& step);
KernelKey key_of(const ActivationGradient& step);
KernelKey key_of(const InputGradient& step);
KernelKey key_of(const WeightGradient& step);  // whose first part has the properties of all
KernelKey key_of(const LoraProjection& step);

}  // namespace tilemoe::cuda
