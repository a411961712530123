// Which bytes a step trains on. Each pass over the text cuts it into sequences at another offset
// and takes them in another order; both follow from (seed, pass) alone, so a step's batch needs no
// memory of the steps before.
#pragma once

#include <cstdint>
#include <span>

#include "train/ops/shapes.h"

namespace tilemoe::train {

class Batches {
 public:
  // Each sequence comes with the `past` bytes before it, zeros before the text. Throws
  // std::runtime_error if the text is shorter than two sequences.
  Batches(std::span<const uint8_t> text, Sequences sequences, int64_t past, uint64_t seed);

  // The batch after `sequences_before` sequences. A byte's target is the one after it.
  void fill(int64_t sequences_before,
            std::span<uint8_t> inputs,          // out (sequences, past + length)
            std::span<uint8_t> targets) const;  // out (T)

 private:
  std::span<const uint8_t> text_;
  Sequences sequences_;
  int64_t past_;
  uint64_t seed_;
  uint64_t cuts_;  // sequences in a pass
};

// A permutation of [0, size): where number i goes. A Feistel network on the smallest even number of
// bits that holds the size, walked until it lands inside.
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t key);
  uint64_t operator()(uint64_t i) const;

 private:
  uint64_t size_;
  uint64_t key_;
  int half_bits_ = 1;
};

}  // namespace tilemoe::train
