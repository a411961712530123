#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "call.h"
#include "register.h"

namespace tilemoe_torch {
namespace {

int64_t capture_id(Tensor tensor) {
  const Call call({{"tensor", tensor}});
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const auto stream = static_cast<cudaStream_t>(call.stream());
  if (const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id))
    throw std::runtime_error(std::string("tilemoe: cudaStreamGetCaptureInfo: ") +
                             cudaGetErrorString(error));
  return status == cudaStreamCaptureStatusActive ? static_cast<int64_t>(id) : 0;
}

}  // namespace
}  // namespace tilemoe_torch

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CUDA, m) {
  tilemoe_torch::register_operators(m);
  m.impl("capture_id", TORCH_BOX(&tilemoe_torch::capture_id));
}

STABLE_TORCH_LIBRARY_IMPL(tilemoe, CompositeExplicitAutograd, m) {
  m.impl("set_block_turns", TORCH_BOX(&tilemoe_torch::set_block_turns));
}
