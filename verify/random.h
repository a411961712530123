// Random numbers that depend on the seed alone, not on a standard library's distributions.
#pragma once

#include <cmath>
#include <cstdint>

namespace tilemoe::verify {

// SplitMix64 (Steele, Lea, Flood 2014). `stream` selects one of several sequences of a seed.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : state_(seed * 0xd1342543de82ef95u + stream) {
    state_ = bits();
  }

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // In (0, 1].
  double uniform() { return (static_cast<double>(bits() >> 11) + 1) * 0x1p-53; }

  // In [0, count).
  int64_t below(int64_t count) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(count));
  }

  // N(0, 1), by the Box-Muller transform.
  double normal() {
    constexpr double kTwoPi = 6.283185307179586;
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(kTwoPi * uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace tilemoe::verify
