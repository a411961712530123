// Results of a pure function, kept by its arguments.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tilemoe::cuda {

// The arguments as whole numbers; a function whose first argument is never 0 needs no mark for an
// empty place.
template <size_t kNumbers>
using RecentKey = std::array<uint64_t, kNumbers>;

// A key has one place, where the newest result replaces an older one, so the memory is bounded. Not
// synchronised: each thread has its own.
template <size_t kNumbers, class Value, size_t kPlaces>
class Recent {
 public:
  using Key = RecentKey<kNumbers>;

  // The value of `make` for this key, from an earlier call if its place still has it.
  template <class Make>
  const Value& get(const Key& key, const Make& make) {
    Entry& entry = entries_[place_of(key)];
    if (entry.key != key) {
      entry.key = {};  // `make` may throw
      entry.value = make();
      entry.key = key;
    }
    return entry.value;
  }

  static size_t place_of(const Key& key) {
    uint64_t mixed = 0;
    for (const uint64_t number : key) {
      mixed = (mixed ^ number) * 0x9e3779b97f4a7c15;
      mixed ^= mixed >> 32;
    }
    return static_cast<size_t>(mixed % kPlaces);
  }

 private:
  struct Entry {
    Key key{};
    Value value{};
  };
  std::array<Entry, kPlaces> entries_{};
};

}  // namespace tilemoe::cuda
