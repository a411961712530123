#include "train/memory.h"

#include <cstring>
#include <new>

namespace tilemoe::train {
namespace {

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

 private:
  static constexpr std::align_val_t kAlignment{64};
};

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace tilemoe::train
