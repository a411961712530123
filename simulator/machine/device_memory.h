// Device memory: one range of addresses, with its shadow. Arrays have gaps between them, so that an
// access next to an array is detected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "simulator/machine/shadow.h"

namespace tilemoe::simulator {

class DeviceMemory {
 public:
  DeviceMemory();
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* allocate(size_t bytes);  // null: no memory is left
  bool release(void* memory);    // false: no array begins there

  bool has(const void* address) const { return offset(address) < kBytes; }
  size_t offset(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin_);
  }
  Cell* cells() const { return cells_; }
  // Whether all of it lies in one array.
  bool allocated(const void* address, size_t bytes) const {
    const size_t first = offset(address);
    return first + bytes <= kBytes && (cells_[first / 4].state & Cell::kAllocated) != 0 &&
           (cells_[(first + bytes - 1) / 4].state & Cell::kAllocated) != 0;
  }
  void forget_accesses();                     // keeps which bytes were written
  std::string describe(size_t offset) const;  // "array 3 (4096 bytes) + 132"

 private:
  static constexpr size_t kBytes = size_t{16} << 30;  // of addresses
  static constexpr size_t kGap = 512;

  struct Array {
    size_t bytes;
    int number;
  };

  std::byte* begin_;
  Cell* cells_;
  std::map<size_t, Array> arrays_;
  size_t end_ = kGap;
  int arrays_ever_ = 0;
};

}  // namespace tilemoe::simulator
