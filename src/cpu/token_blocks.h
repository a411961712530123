// How routing cuts tokens, or pairs, into tasks: by the problem alone, so that results do not
// depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tilemoe::cpu {

struct Blocks {
  int64_t items;  // tokens or pairs
  int64_t size;   // of a block; the last may be shorter
  int64_t count;

  // Blocks of at least `smallest` items, at most `most` of them.
  static Blocks cut(int64_t items, int64_t smallest, int64_t most) {
    const int64_t size = std::max({smallest, (items + most - 1) / most, int64_t{1}});
    return {items, size, (items + size - 1) / size};
  }
  int64_t begin(int64_t block) const { return block * size; }
  int64_t end(int64_t block) const { return std::min(items, (block + 1) * size); }
};

// Elements of logits worth a task of their own: some tens of microseconds.
constexpr int64_t kLogitsPerTask = 16384;

// Tokens of E logits each, without a limit on the number of blocks.
inline Blocks token_blocks(int64_t T, int64_t E) {
  return Blocks::cut(T, std::max<int64_t>(1, kLogitsPerTask / E), std::max<int64_t>(1, T));
}

}  // namespace tilemoe::cpu
