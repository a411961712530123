// The runtime's functions that take a kernel, whose C++ forms are templates of simulated_cuda.h.
#pragma once

#include <driver_types.h>

#include <cstddef>
#include <memory>

namespace tilemoe::simulator {

// `run` calls the kernel with its parameters, which are in `call`, of as many bytes.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::shared_ptr<const void> call, size_t call_bytes, void (*run)(const void*));
// A variable that nobody sets has what somebody left there, as a register has. For its caller's next
// call: where that one's variables will lie, 8 KiB of numbers that the seed decides.
void leave_scraps();
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t get_attributes(cudaFuncAttributes* attributes, const void* kernel);

}  // namespace tilemoe::simulator
