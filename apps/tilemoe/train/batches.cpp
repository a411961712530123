#include "train/batches.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "train/random.h"

namespace tilemoe::train {

Permutation::Permutation(uint64_t size, uint64_t key) : size_(size), key_(key) {
  while (half_bits_ < 32 && (uint64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
}

uint64_t Permutation::operator()(uint64_t i) const {
  constexpr uint64_t kRounds = 4;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  do {
    uint64_t left = i >> half_bits_, right = i & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t mixed = left ^ (mix_bits(key_ + mix_bits(right * kRounds + round)) & mask);
      left = right;
      right = mixed;
    }
    i = left << half_bits_ | right;
  } while (i >= size_);
  return i;
}

Batches::Batches(std::span<const uint8_t> text, Sequences sequences, int64_t past, uint64_t seed)
    : text_(text), sequences_(sequences), past_(past), seed_(seed) {
  const auto length = static_cast<uint64_t>(sequences.length);
  // Wherever the first sequence begins in [0, length), the last one and its target fit.
  cuts_ = text.size() < 2 * length ? 0 : (text.size() - length) / length;
  if (cuts_ == 0)
    throw std::runtime_error("the training text has " + std::to_string(text.size()) +
                             " bytes, too few for sequences of " + std::to_string(length) +
                             ": give more text or a smaller --length");
}

void Batches::fill(int64_t sequences_before, std::span<uint8_t> inputs,
                   std::span<uint8_t> targets) const {
  const auto count = static_cast<uint64_t>(sequences_.count);
  const auto length = static_cast<uint64_t>(sequences_.length);
  const RandomStream offsets(seed_, "offset of a pass"), orders(seed_, "order of a pass");
  for (uint64_t b = 0; b < count; ++b) {
    const uint64_t drawn = static_cast<uint64_t>(sequences_before) + b;
    const uint64_t pass = drawn / cuts_;
    const uint64_t cut = Permutation(cuts_, orders.bits(pass))(drawn % cuts_);
    const uint64_t start = offsets.bits(pass) % length + cut * length;
    const auto before = static_cast<uint64_t>(past_), known = std::min(before, start);
    uint8_t* const row = inputs.data() + b * (before + length);
    std::fill_n(row, before - known, uint8_t{0});
    std::copy_n(text_.data() + start - known, known + length, row + before - known);
    std::copy_n(text_.data() + start + 1, length, targets.data() + b * length);
  }
}

}  // namespace tilemoe::train
