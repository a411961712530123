#include "simulator/machine/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace tilemoe::simulator {
namespace {

void* reserve(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

// Gives whole pages back and fills the rest with zeros.
void discard(std::byte* from, size_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(from), end = begin + bytes;
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  if (first >= last) {
    std::memset(from, 0, bytes);
    return;
  }
  std::memset(from, 0, first - begin);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
}

}  // namespace

DeviceMemory::DeviceMemory()
    : begin_(static_cast<std::byte*>(reserve(kBytes))),
      cells_(static_cast<Cell*>(reserve(kBytes / 4 * sizeof(Cell)))) {}

DeviceMemory::~DeviceMemory() {
  munmap(begin_, kBytes);
  munmap(cells_, kBytes / 4 * sizeof(Cell));
}

void* DeviceMemory::allocate(size_t bytes) {
  const size_t first = end_;
  const size_t room = (bytes + 3) / 4 * 4;
  if (room > kBytes - first - 2 * kGap) return nullptr;
  end_ = (first + room + kGap + 255) / 256 * 256;
  arrays_[first] = {bytes, arrays_ever_++};
  for (size_t word = first / 4; word < (first + room) / 4; ++word)
    cells_[word].state = Cell::kAllocated;
  // Not zeros, so that a read before the first write shows.
  std::memset(begin_ + first, 0xc5, bytes);
  return begin_ + first;
}

bool DeviceMemory::release(void* memory) {
  const auto array = arrays_.find(offset(memory));
  if (array == arrays_.end()) return false;
  const size_t words = (array->second.bytes + 3) / 4;
  discard(begin_ + array->first, words * 4);
  discard(reinterpret_cast<std::byte*>(cells_ + array->first / 4), words * sizeof(Cell));
  arrays_.erase(array);
  end_ = arrays_.empty() ? kGap
                         : std::min(end_, (arrays_.rbegin()->first +
                                           arrays_.rbegin()->second.bytes + 3 + kGap + 255) /
                                              256 * 256);
  return true;
}

void DeviceMemory::forget_accesses() {
  for (const auto& [first, array] : arrays_)
    for (size_t word = first / 4; word < (first + array.bytes + 3) / 4; ++word)
      cells_[word].write = cells_[word].reads[0] = cells_[word].reads[1] = Recorded();
}

std::string DeviceMemory::describe(size_t at) const {
  auto array = arrays_.upper_bound(at);
  if (array == arrays_.begin()) return "device memory + " + std::to_string(at);
  --array;
  return "array " + std::to_string(array->second.number) + " (" +
         std::to_string(array->second.bytes) + " bytes) + " + std::to_string(at - array->first);
}

}  // namespace tilemoe::simulator
