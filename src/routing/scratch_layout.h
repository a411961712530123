// Hands out consecutive arrays of a step's scratch; without memory it only measures.
#pragma once

#include "check.h"

namespace tilemoe {

class ScratchLayout {
 public:
  explicit ScratchLayout(void* base) : base_(static_cast<char*>(base)) {}

  template <class Element>
  Element* take(int64_t count) {
    char* place = base_ ? base_ + used_ : nullptr;
    const int64_t bytes = checked_product(count, sizeof(Element), "bytes of scratch");
    used_ += round_up(static_cast<size_t>(bytes), kAlignment);
    return reinterpret_cast<Element*>(place);
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment =
      64;  // a cache line of the CPU, so that tasks do not share one
  char* base_;
  size_t used_ = 0;
};

}  // namespace tilemoe
