// Work in separate processes: the simulator has one machine per process.
#pragma once

#include <cstddef>
#include <functional>

namespace tilemoe::simulator {

// Calls work(i) for each i below `count`, each in a child of this process, `at_once` of them at a
// time. Calls ended() after each, and returns when all have ended. `work` writes its results to
// SharedBytes; a child that died has written none.
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
