#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>
#include <string>

#include "bindings/cuda/runtime.h"
#include "call.h"
#include "namespace.h"
#include "register.h"
#include "verify/memory.h"

namespace tilemoe_torch {
namespace {

int64_t capture_id(Tensor tensor) {
  const Call call({{"tensor", tensor}});
  unsigned long long id = 0;
  if (const char* const error = tilemoe_runtime_capture(call.stream(), &id))
    throw std::runtime_error(std::string("cudaStreamGetCaptureInfo: ") + error);
  return static_cast<int64_t>(id);
}

void set_arch(std::string arch) {
  check(tilemoe_set_cuda_arch(arch.c_str()));
}

std::string arch_of(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(narrowed<int32_t>("device", device));
  std::string text = tilemoe_cuda_arch();
  if (*tilemoe_last_error()) throw std::runtime_error("unsupported: " + text);
  return text;
}

}  // namespace
}  // namespace tilemoe_torch

namespace tilemoe::verify {

Memory& cuda_memory() {
  return *tilemoe_runtime_memory();
}

}  // namespace tilemoe::verify

TILEMOE_TORCH_LIBRARY_IMPL(TILEMOE_TORCH_NAMESPACE, CUDA, m) {
  tilemoe_torch::register_operators(m);
  m.impl("capture_id", TORCH_BOX(&tilemoe_torch::capture_id));
}

TILEMOE_TORCH_LIBRARY_IMPL(TILEMOE_TORCH_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("set_ctas_per_sm", TORCH_BOX(&tilemoe_torch::set_ctas_per_sm));
  m.impl("set_arch", TORCH_BOX(&tilemoe_torch::set_arch));
  m.impl("arch_of", TORCH_BOX(&tilemoe_torch::arch_of));
}
