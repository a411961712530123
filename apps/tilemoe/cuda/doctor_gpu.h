// What `tilemoe doctor` asks a GPU itself.
#pragma once

#include <string>

#include "cuda/verdict.h"
#include "doctor_report.h"
#include "verify/case.h"

namespace tilemoe::app {

// Makes it the current device of this thread. Throws std::runtime_error where there is no such GPU.
void use_gpu(int index);
DoctorGpu describe_gpu();
// What this build lacks for a GPU, what this machine has of it and how to get the rest: a clause, or
// nothing in a build with the CUDA backend, which gives its reasons itself.
std::string what_the_build_lacks();
// What a verdict on the kit is about there; asks the driver, and runs nothing.
cuda::VerdictKey verdict_key_of(int index, const std::string& kit);

// A few rounds of forward and backward, beside the layer's dense products. With fewer tokens where
// memory is short; an error of the GPU is in the result.
DoctorTimes time_layer(verify::Case layer);

}  // namespace tilemoe::app
