#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "number.h"

namespace tilemoe::verify {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kGuardBefore = kAlignment + 16;
constexpr size_t kGuardAfter = 256;
constexpr int64_t kGapBytes = 16;

// Keeps more threads busy than the machine has cores.
class SpinningThreads final : public OtherWork {
 public:
  SpinningThreads() {
    for (unsigned i = 0; i < std::thread::hardware_concurrency() + 1; ++i)
      spinners_.emplace_back([this] {
        while (!stop_.load(std::memory_order_relaxed)) continue;
      });
  }
  ~SpinningThreads() override {
    stop_ = true;
    for (std::thread& spinner : spinners_) spinner.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> spinners_;
};

class HostMemory final : public Memory {
 public:
  Device device() const override { return Device::kCpu; }
  void* allocate(size_t bytes) override {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, rounded);
    if (!memory) throw std::bad_alloc();
    return memory;
  }
  void release(void* memory) override { std::free(memory); }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from_host, bytes);
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to_host, from, bytes);
  }
  std::unique_ptr<OtherWork> do_other_work() override {
    return std::make_unique<SpinningThreads>();
  }
};

// Bytes [first, first + bytes) of the pattern. The exponent bits of float16 and bfloat16 are all
// ones in each half word, so every aligned element of 2 or 4 bytes is a NaN; as an integer it is
// negative.
constexpr uint32_t kPayloads = 127;
constexpr size_t kPatternPeriod = 2 * kPayloads;
std::vector<std::byte> pattern(size_t first, size_t bytes) {
  constexpr uint32_t kNaN = 0xff80;
  std::vector<std::byte> result(bytes);
  const size_t period = std::min(bytes, kPatternPeriod);
  for (size_t i = 0; i < period; ++i) {
    const size_t place = first + i;
    const uint32_t word = kNaN | (1 + static_cast<uint32_t>(place / 2) % kPayloads);
    result[i] = static_cast<std::byte>(place % 2 ? word >> 8 : word & 0xff);
  }
  for (size_t done = period; done < bytes; done *= 2)
    std::memcpy(result.data() + done, result.data(), std::min(done, bytes - done));
  return result;
}

// Strides of a tensor, and the elements from its first to its last.
Tensor lay_out(DType dtype, const std::vector<int64_t>& shape, MatrixLayout layout) {
  Tensor tensor;
  tensor.dtype = to_c(dtype);
  tensor.ndim = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) tensor.shape[i] = shape[i];
  const int64_t gap = layout.padded ? kGapBytes / static_cast<int64_t>(size_of(dtype)) : 0;
  const int last = tensor.ndim - 1;
  int order[TILEMOE_MAX_DIMS] = {last, last - 1, last - 2};
  if (layout.transposed) std::swap(order[0], order[1]);
  int64_t step = 1;
  for (int i = 0; i < tensor.ndim; ++i) {
    tensor.stride[order[i]] = step;
    step = step * tensor.shape[order[i]] + gap;
  }
  return tensor;
}

size_t extent_bytes(const Tensor& tensor) {
  int64_t last = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return 0;
    last += (tensor.shape[i] - 1) * tensor.stride[i];
  }
  return static_cast<size_t>(last + 1) * tilemoe_dtype_size(tensor.dtype);
}

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

Memory& memory_of(Device device) {
  return device == Device::kCuda ? cuda_memory() : host_memory();
}

GuardedBuffer::GuardedBuffer(Memory& memory, size_t bytes) : memory_(&memory), bytes_(bytes) {
  allocation_ = memory.allocate(kGuardBefore + bytes + kGuardAfter);
  poison();
}
GuardedBuffer::~GuardedBuffer() {
  if (allocation_) memory_->release(allocation_);
}
GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : memory_(other.memory_),
      allocation_(std::exchange(other.allocation_, nullptr)),
      bytes_(other.bytes_) {}
GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(allocation_, other.allocation_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void* GuardedBuffer::data() const {
  return static_cast<char*>(allocation_) + kGuardBefore;
}

void GuardedBuffer::poison() {
  constexpr size_t kChunk = kPatternPeriod << 16;
  const size_t all = kGuardBefore + bytes_ + kGuardAfter;
  const std::vector<std::byte> part = pattern(0, std::min(kChunk, all));
  for (size_t first = 0; first < all; first += kChunk)
    memory_->copy_in(static_cast<char*>(allocation_) + first, part.data(),
                     std::min(kChunk, all - first));
}

void GuardedBuffer::write(const std::vector<std::byte>& contents) {
  memory_->copy_in(data(), contents.data(), contents.size());
}

std::vector<std::byte> GuardedBuffer::read() const {
  std::vector<std::byte> contents(bytes_);
  memory_->copy_out(contents.data(), data(), bytes_);
  return contents;
}

std::vector<std::byte> GuardedBuffer::poisoned() const {
  return pattern(kGuardBefore, bytes_);
}

bool GuardedBuffer::guards_intact() const {
  const auto intact = [&](size_t first, size_t bytes) {
    std::vector<std::byte> found(bytes);
    memory_->copy_out(found.data(), static_cast<char*>(allocation_) + first, bytes);
    return found == pattern(first, bytes);
  };
  return intact(0, kGuardBefore) && intact(kGuardBefore + bytes_, kGuardAfter);
}

uint64_t GuardedBuffer::fingerprint() const {
  std::vector<std::byte> all(kGuardBefore + bytes_ + kGuardAfter);
  memory_->copy_out(all.data(), allocation_, all.size());
  all.resize((all.size() + 7) / 8 * 8);
  uint64_t hash = 0;
  for (size_t i = 0; i < all.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, all.data() + i, 8);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

GuardedTensor::GuardedTensor(Memory& memory, DType dtype, std::vector<int64_t> shape,
                             MatrixLayout layout)
    : view_(lay_out(dtype, shape, layout)), buffer_(memory, extent_bytes(view_)) {
  view_.data = buffer_.data();
}

int64_t GuardedTensor::elements() const {
  int64_t count = 1;
  for (int i = 0; i < view_.ndim; ++i) count *= view_.shape[i];
  return count;
}

template <class Visit>
void GuardedTensor::for_each_element(Visit&& visit) const {
  int64_t shape[3] = {1, 1, 1}, stride[3] = {0, 0, 0};
  for (int i = 0; i < view_.ndim; ++i) {
    shape[3 - view_.ndim + i] = view_.shape[i];
    stride[3 - view_.ndim + i] = view_.stride[i];
  }
  int64_t element = 0;
  for (int64_t i = 0; i < shape[0]; ++i)
    for (int64_t j = 0; j < shape[1]; ++j)
      for (int64_t k = 0; k < shape[2]; ++k)
        visit(element++, i * stride[0] + j * stride[1] + k * stride[2]);
}

void GuardedTensor::write(const std::vector<float>& values) {
  std::vector<std::byte> contents = buffer_.poisoned();
  const auto dtype = static_cast<DType>(view_.dtype);
  for_each_element([&](int64_t element, int64_t place) {
    store(dtype, contents.data(), place, values[static_cast<size_t>(element)]);
  });
  buffer_.write(contents);
}

std::vector<float> GuardedTensor::read() const {
  const std::vector<std::byte> contents = buffer_.read();
  std::vector<float> values(static_cast<size_t>(elements()));
  const auto dtype = static_cast<DType>(view_.dtype);
  for_each_element([&](int64_t element, int64_t place) {
    values[static_cast<size_t>(element)] = static_cast<float>(load(dtype, contents.data(), place));
  });
  return values;
}

bool GuardedTensor::gaps_intact() const {
  std::vector<std::byte> contents = buffer_.read();
  const std::vector<std::byte> expected = buffer_.poisoned();
  const size_t size = tilemoe_dtype_size(view_.dtype);
  for_each_element([&](int64_t, int64_t place) {
    const size_t at = static_cast<size_t>(place) * size;
    std::memcpy(contents.data() + at, expected.data() + at, size);
  });
  return contents == expected && buffer_.guards_intact();
}

}  // namespace tilemoe::verify
