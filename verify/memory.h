// Memory of a device, and buffers in it that detect accesses outside of their elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tilemoe/tensor.h"

namespace tilemoe::verify {

// Other work that a device does as long as this object exists.
class OtherWork {
 public:
  virtual ~OtherWork() = default;
};

// The memory of a backend's tensors. Copies are complete when they return.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Device device() const = 0;
  virtual void* allocate(size_t bytes) = 0;  // on 256 bytes
  virtual void release(void* memory) = 0;
  virtual void copy_in(void* to, const void* from_host, size_t bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t bytes) = 0;
  virtual std::unique_ptr<OtherWork> do_other_work() = 0;
};

Memory& host_memory();
// The current GPU's memory; throws std::runtime_error in a build without the CUDA backend.
Memory& cuda_memory();
Memory& memory_of(Device device);

// Bytes between two guards, on 16 bytes and on no larger power of two. Guards, and the contents
// after poison(), are a pattern that is NaN in every floating type and differs from place to place,
// so that a read past an end changes the result and a write there is detected.
class GuardedBuffer {
 public:
  GuardedBuffer(Memory& memory, size_t bytes);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;

  void* data() const;
  size_t bytes() const { return bytes_; }

  void poison();
  void write(const std::vector<std::byte>& contents);
  std::vector<std::byte> read() const;
  // The pattern that poison() writes.
  std::vector<std::byte> poisoned() const;
  bool guards_intact() const;
  // A hash of all bytes, guards included.
  uint64_t fingerprint() const;

 private:
  Memory* memory_;
  void* allocation_ = nullptr;
  size_t bytes_ = 0;
};

// The layout in memory of a matrix, the last two dimensions of a tensor.
struct MatrixLayout {
  bool padded = false;      // gaps of 16 bytes between rows and between experts
  bool transposed = false;  // the last dimension but one is contiguous
};

// A tensor in a guarded buffer, dense or with gaps between its rows. The gaps are guards too.
class GuardedTensor {
 public:
  GuardedTensor(Memory& memory, DType dtype, std::vector<int64_t> shape, MatrixLayout layout = {});

  const Tensor& view() const { return view_; }
  int64_t elements() const;

  void poison() { buffer_.poison(); }
  // Element i in row-major order of the shape; the value is rounded to the dtype.
  void write(const std::vector<float>& values);
  std::vector<float> read() const;
  std::vector<std::byte> bits() const { return buffer_.read(); }
  uint64_t fingerprint() const { return buffer_.fingerprint(); }
  bool is_poisoned() const { return buffer_.read() == buffer_.poisoned(); }
  // Whether only elements were written since the buffer was poisoned.
  bool gaps_intact() const;

 private:
  // Calls visit(element in row-major order, element's place in the buffer).
  template <class Visit>
  void for_each_element(Visit&& visit) const;

  Tensor view_;
  GuardedBuffer buffer_;
};

}  // namespace tilemoe::verify
