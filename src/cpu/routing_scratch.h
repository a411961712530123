// What building a routing keeps in the caller's workspace.
#pragma once

#include <limits>

#include "cpu/scratch_layout.h"
#include "cpu/token_blocks.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {

inline int32_t saturate(int64_t count) {
  return static_cast<int32_t>(std::min<int64_t>(count, std::numeric_limits<int32_t>::max()));
}

// What one block of pairs found.
struct PairBlock {
  int32_t token_before;  // general: largest token in range before the block
  int32_t bad_ids;
  int32_t nan_tokens, first_nan_token, last_nan_token;  // tokens with a NaN score
};

// The counting sort of pairs by expert.
struct SortScratch {
  Blocks blocks;
  PairBlock* pair_blocks;  // (blocks)
  int32_t* rows;           // (blocks + 1, E)
  size_t bytes;

  SortScratch(const tilemoe_routing_spec& spec, void* memory)
      : blocks(Blocks::cut(spec.pairs, std::max(kPairsPerBlock, spec.E), kMostBlocks)) {
    ScratchLayout layout(memory);
    pair_blocks = layout.take<PairBlock>(blocks.count);
    rows = layout.take<int32_t>((blocks.count + 1) * spec.E);
    bytes = layout.used();
  }

  // Before the scan, a block's number of pairs by expert; they lie where the next block's starts
  // will, so that the scan needs no memory of its own.
  int32_t* block_counts(int64_t block, int64_t E) const { return rows + (block + 1) * E; }
  // After the scan, a block's first row by expert.
  int32_t* block_starts(int64_t block, int64_t E) const { return rows + block * E; }

  // Fills the routing's offsets, cut at its capacity, and every block's starts, which are not cut.
  // Returns the number of pairs counted.
  int64_t scan_counts(tilemoe_routing& routing) const {
    const int64_t E = routing.spec.E;
    int32_t* totals = rows;
    std::fill_n(totals, E, 0);
    for (int64_t b = 0; b < blocks.count; ++b)
      for (int64_t e = 0; e < E; ++e) totals[e] += block_counts(b, E)[e];
    int32_t start = 0;
    for (int64_t e = 0; e < E; ++e) {
      routing.offsets[e] = std::min(start, saturate(routing.spec.capacity));
      const int32_t count = totals[e];
      totals[e] = start;
      start += count;
    }
    routing.offsets[E] = std::min(start, saturate(routing.spec.capacity));
    for (int64_t b = 0; b < blocks.count; ++b)
      for (int64_t e = 0; e < E; ++e) block_counts(b, E)[e] += block_starts(b, E)[e];
    return start;
  }

 private:
  static constexpr int64_t kPairsPerBlock = 4096;
  static constexpr int64_t kMostBlocks = 64;
};

}  // namespace tilemoe::cpu
