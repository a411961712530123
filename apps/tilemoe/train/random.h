// Random numbers without a state: number i of a stream is a function of (seed, stream, i), so what
// a step draws does not depend on what was drawn before, and a resumed run needs no more than its
// step.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace tilemoe::train {

// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection that spreads every bit.
inline constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class RandomStream {
 public:
  RandomStream(uint64_t seed, std::string_view name) : key_(mix_bits(seed + kGolden)) {
    for (const char c : name) key_ = mix_bits((key_ ^ static_cast<uint8_t>(c)) + kGolden);
  }

  uint64_t bits(uint64_t i) const { return mix_bits(key_ + (i + 1) * kGolden); }
  // In (0, 1).
  double uniform(uint64_t i) const { return (static_cast<double>(bits(i) >> 11) + 0.5) * 0x1p-53; }
  // A normal number of mean 0 and variance 1 (Box and Muller 1958).
  double normal(uint64_t i) const {
    return std::sqrt(-2 * std::log(uniform(2 * i))) *
           std::cos(2 * std::numbers::pi * uniform(2 * i + 1));
  }

 private:
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  uint64_t key_;
};

}  // namespace tilemoe::train
