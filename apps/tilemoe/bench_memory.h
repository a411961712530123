// Memory for the bench: aligned buffers, random fillings, and the two questions asked of the
// machine: how much is free, and how to make the caches cold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "tilemoe/tensor.h"

namespace tilemoe::app {

// Zeroed, so that its pages are there before anything is timed; on 64 bytes.
class Buffer {
 public:
  Buffer() = default;
  // Throws std::bad_alloc.
  explicit Buffer(size_t bytes);
  Buffer(DType dtype, int64_t elements) : Buffer(size_of(dtype) * static_cast<size_t>(elements)) {}

  void* data() const { return data_.get(); }
  template <class Element>
  Element* as() const {
    return static_cast<Element*>(data());
  }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

// scale * N(0, 1); the same values whatever the number of threads.
void fill_normal(DType dtype, void* data, int64_t elements, double scale, uint64_t seed);

// Bytes that a process may still take, by the system's and the control group's account; the largest
// size_t where neither can be read.
size_t available_memory();

// Writes through more memory than the second-level caches of all cores hold. The third level, which
// a virtual machine shares with others, is not flushed.
class CacheFlush {
 public:
  void operator()() const;

 private:
  Buffer buffer_{size_t{64} << 20};
};

}  // namespace tilemoe::app
