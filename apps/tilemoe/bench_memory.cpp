#include "bench_memory.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "cpu/thread_pool.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::app {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kBlock = int64_t{1} << 16;  // elements of one random sequence

int64_t blocks(int64_t elements) {
  return (elements + kBlock - 1) / kBlock;
}

// The number in a file that holds nothing else; `missing` where there is none ("max", no file).
size_t number_in(const char* path, size_t missing) {
  size_t number = 0;
  return std::ifstream(path) >> number ? number : missing;
}

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

size_t available_to_system() {
  std::ifstream file("/proc/meminfo");
  for (std::string key; file >> key;) {
    size_t kibibytes = 0;
    if (key == "MemAvailable:" && file >> kibibytes) return kibibytes * 1024;
  }
  return kUnlimited;
}

size_t available_to_control_group() {
  const size_t limit = number_in("/sys/fs/cgroup/memory.max", kUnlimited);
  if (limit == kUnlimited) return kUnlimited;
  return limit - std::min(limit, number_in("/sys/fs/cgroup/memory.current", 0));
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  const size_t rounded = std::max((bytes + kAlignment - 1) / kAlignment, size_t{1}) * kAlignment;
  data_.reset(std::aligned_alloc(kAlignment, rounded));
  if (!data_) throw std::bad_alloc();
  std::memset(data_.get(), 0, rounded);
}

void fill_normal(DType dtype, void* data, int64_t elements, double scale, uint64_t seed) {
  cpu::parallel_for(blocks(elements), [&](int64_t block, int) {
    verify::Random random(seed, static_cast<uint64_t>(block));
    const int64_t end = std::min(elements, (block + 1) * kBlock);
    for (int64_t i = block * kBlock; i < end; ++i)
      verify::store(dtype, data, i, scale * random.normal());
  });
}

size_t available_memory() {
  return std::min(available_to_system(), available_to_control_group());
}

void CacheFlush::operator()() const {
  // Both halves of the work on every core: a core's cache is cold only if that core filled it.
  constexpr size_t kPiece = size_t{256} << 10;
  cpu::parallel_for(static_cast<int64_t>(buffer_.bytes() / kPiece), [&](int64_t piece, int) {
    std::byte* bytes = buffer_.as<std::byte>() + static_cast<size_t>(piece) * kPiece;
    for (size_t i = 0; i < kPiece; i += kAlignment) bytes[i] ^= std::byte{1};
  });
}

}  // namespace tilemoe::app
