// The runtime's functions that take a kernel; simulated_cuda.h has their C++ templates.
#pragma once

#include <driver_types.h>

#include <cstddef>
#include <memory>

namespace tilemoe::simulator {

// `run` calls the kernel with its parameters, which are the `call_bytes` bytes at `call`.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::shared_ptr<const void> call, size_t call_bytes, void (*run)(const void*));
// Fills the 8 KiB of stack that the caller's next call will use with numbers that the seed decides:
// an uninitialized variable then has an old value, as a register has.
void leave_scraps();
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t get_attributes(cudaFuncAttributes* attributes, const void* kernel);

}  // namespace tilemoe::simulator
