// Where a benched layer runs: its memory, random numbers in it, and the router's products.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "verify/case.h"
#include "verify/memory.h"

namespace tilemoe::app {

// The router's matrix products, which are the application's and not the library's. Logits are of
// the layer's type, as a model in 16 bits has them.
class RouterProducts {
 public:
  virtual ~RouterProducts() = default;
  // X (T, d), Wr (E, d) -> logits (T, E)
  virtual void forward(const Tensor& X, const Tensor& Wr, const Tensor& logits) = 0;
  // dlogits (T, E) -> the router's part of dX (T, d), and dWr (E, d)
  virtual void backward(const Tensor& dlogits, const Tensor& X, const Tensor& Wr, const Tensor& dX,
                        const Tensor& dWr) = 0;
};

class BenchMachine {
 public:
  virtual ~BenchMachine() = default;
  virtual verify::Memory& memory() const = 0;
  Device device() const { return memory().device(); }
  // Bytes that may still be taken.
  virtual size_t available_memory() const = 0;
  // scale * N(0, 1)
  virtual void fill_normal(DType dtype, void* to, int64_t elements, double scale,
                           uint64_t seed) const = 0;
  virtual std::unique_ptr<RouterProducts> router(const verify::Case& layer,
                                                 bool with_backward) const = 0;
};

const BenchMachine& cpu_machine();

// Memory of a machine; what is in it is arbitrary.
class MachineBuffer {
 public:
  MachineBuffer() = default;
  MachineBuffer(const BenchMachine& machine, size_t bytes)
      : memory_(&machine.memory()),
        data_(memory_->allocate(std::max(bytes, size_t{1}))),
        bytes_(bytes) {}
  MachineBuffer(const BenchMachine& machine, DType dtype, int64_t elements)
      : MachineBuffer(machine, size_of(dtype) * static_cast<size_t>(elements)) {}
  ~MachineBuffer() {
    if (data_) memory_->release(data_);
  }
  MachineBuffer(MachineBuffer&& other) noexcept { *this = std::move(other); }
  MachineBuffer& operator=(MachineBuffer&& other) noexcept {
    std::swap(memory_, other.memory_), std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  verify::Memory* memory_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tilemoe::app
