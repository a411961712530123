#include "watched_calls.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

namespace tilemoe::train {
namespace {

std::vector<std::string>* watched = nullptr;

void note(const std::string& event) {
  if (watched) watched->push_back(event);
}

std::string name_of(const char* path) {
  return std::filesystem::path(path).filename().string();
}

}  // namespace

std::vector<std::string> calls_of(const std::function<void()>& body) {
  struct Watch {
    Watch() { watched = &calls; }
    ~Watch() { watched = nullptr; }
    std::vector<std::string> calls;
  } watch;
  body();
  return watch.calls;
}

}  // namespace tilemoe::train

using namespace tilemoe::train;

// In place of the C library's, for the C++ library, too.
#define WATCHED extern "C" __attribute__((visibility("default")))

WATCHED int fsync(int descriptor) {
  char path[4096] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  if (::readlink(link.c_str(), path, sizeof path - 1) < 0) return -1;
  struct stat status {};
  ::fstat(descriptor, &status);
  const bool folder = S_ISDIR(status.st_mode);
  note("sync " + (folder ? "folder" : name_of(path) + " " + std::to_string(status.st_size)));
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
WATCHED int rename(const char* from, const char* to) noexcept {
  note("rename " + name_of(to));
  return static_cast<int>(::syscall(SYS_rename, from, to));
}
WATCHED int remove(const char* path) noexcept {
  note("remove " + name_of(path));
  return static_cast<int>(::syscall(SYS_unlink, path));
}
