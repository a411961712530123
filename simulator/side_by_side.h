// Work in processes of its own: the simulator has one machine a process.
#pragma once

#include <cstddef>
#include <functional>

namespace tilemoe::simulator {

// Calls work(i) for each i below `count`, each in a child of this process, `at_once` of them side by
// side. Calls ended() after each, and returns when all have ended. What `work` is to leave behind it
// writes to SharedBytes; of a child that died nothing is told there.
void side_by_side(
    size_t count, int at_once, const std::function<void(size_t)>& work,
    const std::function<void()>& ended = [] {});

// Zeros that this process and its children have in common.
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
