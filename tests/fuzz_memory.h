// Memory for the fuzz test: regions between inaccessible pages, so that an access past
// either end stops the program even from code that no sanitizer sees.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "tilemoe/tilemoe.h"

namespace tilemoe::fuzz {

class Region {
 public:
  explicit Region(size_t bytes) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    bytes_ = (bytes + page_ - 1) / page_ * page_;
    void* memory = mmap(nullptr, bytes_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<unsigned char*>(memory) + page_;
    if (mprotect(base_, bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  }
  ~Region() { munmap(base_ - page_, bytes_ + 2 * page_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  unsigned char* begin() const { return base_; }
  size_t bytes() const { return bytes_; }
  // Places `count` bytes next to the guard before or, as far as `alignment` allows, behind them.
  unsigned char* place(size_t count, size_t alignment, bool at_end) const {
    return at_end ? base_ + (bytes_ - count) / alignment * alignment : base_;
  }
  void remember() { before_.assign(base_, base_ + bytes_); }
  bool unchanged() const { return unchanged(0, bytes_); }
  bool unchanged(size_t from, size_t to) const {
    return std::memcmp(base_ + from, before_.data() + from, to - from) == 0;
  }

 private:
  size_t page_;
  size_t bytes_ = 0;
  unsigned char* base_ = nullptr;
  std::vector<unsigned char> before_;
};

// Bytes from a tensor's first element to past its last; SIZE_MAX if a dimension or a stride is
// negative, there are too many dimensions, or the sum is past `limit`.
inline size_t extent(const tilemoe_tensor& tensor, size_t limit) {
  const size_t element = tilemoe_dtype_size(tensor.dtype);
  if (element == 0 || tensor.ndim < 0 || tensor.ndim > TILEMOE_MAX_DIMS) return SIZE_MAX;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] == 0) return 0;
  size_t last = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 1) continue;  // its stride is free
    if (tensor.shape[i] < 0 || tensor.stride[i] < 0) return SIZE_MAX;
    const auto steps = static_cast<size_t>(tensor.shape[i] - 1);
    const auto stride = static_cast<size_t>(tensor.stride[i]);
    if (stride > limit / steps) return SIZE_MAX;
    last += steps * stride;
    if (last > limit) return SIZE_MAX;
  }
  const size_t bytes = (last + 1) * element;
  return bytes <= limit ? bytes : SIZE_MAX;
}

}  // namespace tilemoe::fuzz
