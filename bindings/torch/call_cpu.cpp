// A call on the CPU. The library has torch.get_num_threads() workers. Sizes of workspaces depend on
// their number, so it is locked from the first query of a size to the last call.
#include <pthread.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <mutex>
#include <new>
#include <shared_mutex>

#include "call.h"

namespace tilemoe_torch {
namespace {

std::shared_mutex threads_mutex;  // shared: a call is running; exclusive: their number changes

// A child of fork() lacks the threads that locked it.
[[maybe_unused]] const int fork_handler =
    pthread_atfork(nullptr, nullptr, [] { new (&threads_mutex) std::shared_mutex; });

std::shared_ptr<void> lock_torch_threads() {
  const auto wanted = static_cast<int>(torch::stable::get_num_threads());
  for (;;) {
    auto calling = std::make_shared<std::shared_lock<std::shared_mutex>>(threads_mutex);
    if (tilemoe_num_threads() == wanted) return calling;
    calling->unlock();
    const std::unique_lock changing(threads_mutex);
    check(tilemoe_set_num_threads(wanted));
  }
}

}  // namespace

Call::Call(std::initializer_list<Argument> arguments)
    : torch_device_(device_of(arguments)), device_(TILEMOE_CPU), guard_(lock_torch_threads()) {}

void Call::mm(const Tensor& out, const Tensor& A, const Tensor& B, const MaybeTensor& bias) const {
  TORCH_ERROR_CODE_CHECK(
      bias ? aoti_torch_cpu_addmm_out(out.get(), bias->get(), A.get(), B.get(), 1.0, 1.0)
           : aoti_torch_cpu_mm_out(out.get(), A.get(), B.get()));
}

Tensor Call::add(const Tensor& a, const Tensor& b) const {
  AtenTensorHandle sum = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_add_Tensor(a.get(), b.get(), 1.0, &sum));
  return Tensor(sum);
}

}  // namespace tilemoe_torch
