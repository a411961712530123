// A call on a GPU: the tensors' device is current during the call, and the work goes to torch's
// current stream of that device.
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

Call::Call(std::initializer_list<Argument> arguments)
    : torch_device_(device_of(arguments)),  // a GPU: torch chose this library by one of them
      device_(TILEMOE_CUDA),
      stream_(current_stream(torch_device_.index())),
      guard_(std::make_shared<torch::stable::accelerator::DeviceGuard>(torch_device_.index())) {}

}  // namespace tilemoe_torch
