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

}  // namespace

Call::Call(const Tensor& tensor)
    : torch_device_(tensor.device()),
      device_(TILEMOE_CUDA),
      stream_(current_stream(tensor.get_device_index())),
      held_(std::make_shared<torch::stable::accelerator::DeviceGuard>(tensor.get_device_index())) {}

}  // namespace tilemoe_torch
