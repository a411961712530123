// The memory that a call reads and writes, to reject outputs that share memory with anything else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tilemoe/tilemoe.h"

namespace tilemoe {

// The tensors have passed their checks; absent ones are ignored. Names and tensors must outlive the
// object.
class MemoryUse {
 public:
  // `except` is the name of an output that the input may share memory with.
  void reads(const char* name, const tilemoe_tensor& tensor, const char* except = nullptr);
  void writes(const char* name, const tilemoe_tensor& tensor);
  // Every byte of a range.
  void reads(const char* name, const void* memory, size_t bytes);
  void writes(const char* name, const void* memory, size_t bytes);

  // Throws if two of them share memory and at least one is written.
  void check() const;

 private:
  struct Entry {
    const char* name;
    const char* except;
    uintptr_t begin, end;          // addresses
    const tilemoe_tensor* tensor;  // null: the whole range
    bool written;
  };
  void add(const Entry& entry);
  void add(const char* name, const char* except, const tilemoe_tensor& tensor, bool written);
  static bool share_memory(const Entry& a, const Entry& b);

  static constexpr size_t kMaxArrays = 48;  // a backward has 47
  Entry entries_[kMaxArrays];
  size_t count_ = 0;
};

// Whether both views have the same elements.
bool same_view(const tilemoe_tensor& a, const tilemoe_tensor& b);

}  // namespace tilemoe
