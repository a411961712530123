// A call on a GPU: the tensor's device is the current one meanwhile, and the work goes to torch's
// current stream there.
#include <torch/csrc/stable/accelerator.h>

#include "call.h"

namespace tilemoe_torch {
namespace {

void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

// One tensor on a GPU is enough for torch to choose this library.
int32_t gpu_of(const Tensor& tensor) {
  if (!tensor.is_cuda())
    refuse("a tensor of shape " + describe_shape(tensor) + " is on the CPU, another on a GPU");
  return tensor.get_device_index();
}

}  // namespace

Call::Call(const Tensor& tensor)
    : torch_device_(tensor.device()),
      device_(TILEMOE_CUDA),
      stream_(current_stream(gpu_of(tensor))),
      held_(std::make_shared<torch::stable::accelerator::DeviceGuard>(tensor.get_device_index())) {}

}  // namespace tilemoe_torch
