#include "simulator/side_by_side.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <new>
#include <system_error>

namespace tilemoe::simulator {

SharedBytes::SharedBytes(size_t bytes)
    : data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
      bytes_(bytes) {
  if (data_ == MAP_FAILED) throw std::bad_alloc();
}
SharedBytes::~SharedBytes() {
  munmap(data_, bytes_);
}

void side_by_side(size_t count, int at_once, const std::function<void(size_t)>& work,
                  const std::function<void()>& ended) {
  int running = 0;
  const auto await_one = [&] {
    if (wait(nullptr) < 0) throw std::system_error(errno, std::generic_category(), "wait");
    --running;
    ended();
  };
  for (size_t i = 0; i < count; ++i) {
    if (running == at_once) await_one();
    const pid_t child = fork();
    if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (child == 0) {
      int status = 0;
      try {
        work(i);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        status = 2;
      }
      _exit(status);  // the parent's objects are not this one's to destroy
    }
    ++running;
  }
  while (running > 0) await_one();
}

}  // namespace tilemoe::simulator
