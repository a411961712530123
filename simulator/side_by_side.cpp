#include "simulator/side_by_side.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <new>
#include <system_error>
#include <vector>

namespace tilemoe::simulator {

SharedBytes::SharedBytes(size_t bytes)
    : data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
      bytes_(bytes) {
  if (data_ == MAP_FAILED) throw std::bad_alloc();
}
SharedBytes::~SharedBytes() {
  munmap(data_, bytes_);
}

void side_by_side(size_t count, int processes, const std::function<void(size_t)>& work) {
  if (processes <= 1) {
    for (size_t i = 0; i < count; ++i) work(i);
    return;
  }
  const SharedBytes shared(sizeof(std::atomic<size_t>));
  auto& next = *new (shared.data()) std::atomic<size_t>(0);
  static_assert(std::atomic<size_t>::is_always_lock_free);
  std::vector<pid_t> children;
  for (int process = 0; process < processes; ++process) {
    const pid_t child = fork();
    if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (child == 0) {
      try {
        for (size_t i = next++; i < count; i = next++) work(i);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        _exit(2);
      }
      _exit(0);  // the parent's objects are not this one's to destroy
    }
    children.push_back(child);
  }
  for (const pid_t child : children) waitpid(child, nullptr, 0);
}

}  // namespace tilemoe::simulator
