// Memory of the trainer: taken once, when the model is built; no step allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace tilemoe::train {

// The memory of a device's arrays. Copies wait for the work before them, and are complete when they
// return.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(size_t bytes) = 0;  // on a cache line, zero
  virtual void release(void* memory) = 0;
  virtual void copy_in(void* to, const void* from_host, size_t bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t bytes) = 0;
  // Bytes that can still be taken, if the system reports them.
  virtual std::optional<double> available() const { return std::nullopt; }
};

Memory& host_memory();

// Gives no memory: counts what would be taken. Nothing may be read or written there.
class CountingMemory final : public Memory {
 public:
  void* allocate(size_t bytes) override {
    bytes_ += static_cast<double>(bytes);
    return nullptr;
  }
  void release(void*) override {}
  void copy_in(void*, const void*, size_t) override {}
  void copy_out(void*, const void*, size_t) override {}
  double bytes() const { return bytes_; }

 private:
  double bytes_ = 0;  // a model that is far too large needs more than 64 bits count
};

// An array of numbers, zero at first. What is in it is the host's to touch in the host's memory
// alone; read() and write() work in any.
template <class Element>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t count, Memory& memory = host_memory())
      : memory_(&memory),
        data_(static_cast<Element*>(memory.allocate(static_cast<size_t>(count) * sizeof(Element)))),
        size_(static_cast<size_t>(count)) {}
  ~Array() {
    if (data_ != nullptr) memory_->release(data_);
  }
  Array(Array&& other) noexcept { *this = std::move(other); }
  Array& operator=(Array&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  Element* data() const { return data_; }
  int64_t size() const { return static_cast<int64_t>(size_); }
  std::span<Element> span() const { return {data_, size_}; }
  // The first `count` elements.
  std::span<Element> first(int64_t count) const { return span().first(static_cast<size_t>(count)); }

  std::vector<Element> read() const { return read_first(size()); }
  std::vector<Element> read_first(int64_t count) const {
    std::vector<Element> values(static_cast<size_t>(count));
    if (count > 0) memory_->copy_out(values.data(), data_, values.size() * sizeof(Element));
    return values;
  }
  // The first elements of the array.
  void write(std::span<const Element> values) const {
    if (!values.empty()) memory_->copy_in(data_, values.data(), values.size_bytes());
  }

 private:
  Memory* memory_ = nullptr;
  Element* data_ = nullptr;
  size_t size_ = 0;
};

using FloatArray = Array<float>;

}  // namespace tilemoe::train
