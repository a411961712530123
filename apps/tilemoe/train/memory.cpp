#include "train/memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <string_view>

namespace tilemoe::train {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// The limit in the file of a control group; "max", or no file, is no limit.
double limit_in(const char* path) {
  double bytes = 0;
  return std::ifstream(path) >> bytes ? bytes : kNoLimit;
}

double limit_of_process() {
  rlimit limit{};
  const bool limited = ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? static_cast<double>(limit.rlim_cur) : kNoLimit;
}

// Memory that the system can give without writing anything out: "MemAvailable:   22255612 kB".
double available_on_machine() {
  constexpr std::string_view kKey = "MemAvailable:";
  std::ifstream table("/proc/meminfo");
  for (std::string line; std::getline(table, line);)
    if (line.starts_with(kKey)) return 1024 * std::atof(line.c_str() + kKey.size());
  return kNoLimit;
}

class HostMemory final : public Memory {
 public:
  void* allocate(size_t bytes) override {
    void* const memory = ::operator new(bytes, kAlignment);
    std::memset(memory, 0, bytes);
    return memory;
  }
  void release(void* memory) override { ::operator delete(memory, kAlignment); }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    std::memcpy(to, from_host, bytes);
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    std::memcpy(to_host, from, bytes);
  }
  // The limit of a container or of the process counts as if none of it were taken, since a
  // container's memory includes caches that make room for others.
  std::optional<double> available() const override {
    const double bytes =
        std::min({available_on_machine(), limit_of_process(), limit_in("/sys/fs/cgroup/memory.max"),
                  limit_in("/sys/fs/cgroup/memory/memory.limit_in_bytes")});
    return bytes == kNoLimit ? std::nullopt : std::optional(bytes);
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
};

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace tilemoe::train
