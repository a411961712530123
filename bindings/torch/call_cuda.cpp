// A call on a GPU: the tensors' device is current during the call, and the work goes to torch's
// current stream of that device.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
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

void Call::mm(const Tensor& out, const Tensor& A, const Tensor& B, const MaybeTensor& bias) const {
  TORCH_ERROR_CODE_CHECK(
      bias ? aoti_torch_cuda_addmm_out(out.get(), bias->get(), A.get(), B.get(), 1.0, 1.0)
           : aoti_torch_cuda_mm_out(out.get(), A.get(), B.get()));
}

Tensor Call::add(const Tensor& a, const Tensor& b) const {
  AtenTensorHandle sum = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_add_Tensor(a.get(), b.get(), 1.0, &sum));
  return Tensor(sum);
}

}  // namespace tilemoe_torch
