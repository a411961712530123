// Memory of the trainer: taken once, when the model is built; no step allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

namespace tilemoe::train {

// An array on a cache line, zero at first.
template <class Element>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t count)
      : data_(static_cast<Element*>(
            ::operator new(static_cast<size_t>(count) * sizeof(Element), kAlignment))),
        size_(static_cast<size_t>(count)) {
    std::uninitialized_value_construct_n(data_.get(), size_);
  }

  Element* data() const { return data_.get(); }
  int64_t size() const { return static_cast<int64_t>(size_); }
  std::span<Element> span() const { return {data_.get(), size_}; }
  // The first `count` elements.
  std::span<Element> first(int64_t count) const { return span().first(static_cast<size_t>(count)); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Release {
    void operator()(Element* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<Element, Release> data_;
  size_t size_ = 0;
};

using FloatArray = Array<float>;

}  // namespace tilemoe::train
