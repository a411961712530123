// The simulator's dice: equal on every machine.
#pragma once

#include <cstdint>

namespace tilemoe::simulator {

class Random {
 public:
  explicit Random(uint64_t seed = 1) : state_(seed) {}

  uint64_t next() {  // splitmix64
    uint64_t mixed = state_ += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
  }
  uint32_t below(uint32_t end) { return static_cast<uint32_t>((next() >> 32) * end >> 32); }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

}  // namespace tilemoe::simulator
