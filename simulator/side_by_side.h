// Work in several processes side by side: the simulator has one machine a process.
#pragma once

#include <cstddef>
#include <functional>

namespace tilemoe::simulator {

// Calls work(i) once for each i below `count`, in one of `processes` children of this process; in
// this one where `processes` is 1. Returns when all have ended. What `work` is to leave behind it
// writes to memory that is shared (SharedArray); a child that ends otherwise than by itself leaves
// undone what it was about, and what it would have taken next to the others.
void side_by_side(size_t count, int processes, const std::function<void(size_t)>& work);

// Zeros that processes made by side_by_side() have in common.
class SharedBytes {
 public:
  explicit SharedBytes(size_t bytes);
  ~SharedBytes();
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
  size_t bytes_;
};

}  // namespace tilemoe::simulator
