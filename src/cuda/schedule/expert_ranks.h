// Experts in the order in which the weight gradients take them, longest first; those that are so
// long that one cluster would work on a tile for too long; and the scratch where both are told.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend.h"

namespace tilemoe::cuda {

// What a cluster takes at a time of an expert's product at most, either way, and the rows of a k
// block.
constexpr int64_t kWeightGradientBlock = 256;
constexpr int32_t kSumRows = 64;

// An expert's tiles, as clusters take them; see ExpertTiles.
constexpr int64_t expert_tiles(int64_t m_blocks, int64_t n_blocks, int64_t cluster) {
  return m_blocks / cluster * n_blocks + m_blocks % cluster * ((n_blocks + cluster - 1) / cluster);
}

struct RankedExpert {
  int32_t expert;
  int32_t begin, end;     // its rows
  int32_t blocks_before;  // k blocks of the experts of smaller rank
};

// The experts of the first `count` ranks, with `k_blocks` in all.
struct LongExperts {
  int32_t count, k_blocks;
};

// An expert is long where one of its tiles is more than 1 / kOfAnAverage of a cluster's average
// work; but a sum over few rows is not worth the way through memory.
constexpr int64_t kOfAnAverage = 4;
constexpr int32_t kFewRows = 1024;
constexpr int32_t kLeastShare = 8;  // k blocks

// Whether a tile of an expert of so many rows, among M rows of which each expert has as many tiles,
// is long beside all tiles' work spread over the shares.
constexpr bool is_long(int64_t rows, int64_t M, int64_t tiles, int64_t shares) {
  return rows > kFewRows && rows * kOfAnAverage * shares > M * tiles;
}

// Shares that the work on long experts is cut into at most; 0: no expert counts as long. `tiles`
// are of an expert, as a cluster takes them; it has at most `most_rows` of the `capacity` rows.
// None counts as long where one with that many would not, all rows in use: with fewer in use some
// then go uncut.
constexpr int32_t shares_at_most(int64_t tiles, int64_t capacity, int64_t most_rows, int clusters) {
  // Of `blocks` k blocks in all, no more than all have a tile that long.
  const int64_t blocks = capacity / kSumRows + capacity / kFewRows;
  if (capacity <= kFewRows || tiles >= kOfAnAverage * clusters || blocks > INT32_MAX / tiles)
    return 0;
  const int64_t shares = std::min<int64_t>(clusters, tiles * blocks / kLeastShare);
  return is_long(most_rows, capacity, tiles, shares) ? static_cast<int32_t>(shares) : 0;
}

// In a step's scratch, one after the other.
struct ExpertRanks {
  LongExperts* long_experts;  // (1)
  RankedExpert* ranked;       // (E)
  void* partial_sums;         // (2 a share) blocks of float32

  static size_t bytes(int64_t E, int32_t shares) {
    constexpr size_t kBlockBytes = kWeightGradientBlock * kWeightGradientBlock * sizeof(float);
    return kHead + static_cast<size_t>(E) * sizeof(RankedExpert) +
           2 * static_cast<size_t>(shares) * kBlockBytes;
  }
  static ExpertRanks in(const Scratch& scratch, int64_t E) {
    auto* const head = static_cast<std::byte*>(scratch.data);
    auto* const ranked = reinterpret_cast<RankedExpert*>(head + kHead);
    return {reinterpret_cast<LongExperts*>(head), ranked, ranked + E};
  }

 private:
  static constexpr size_t kHead = 16;
};

// Fills in both; `tiles` as above.
void rank_experts(const Rows& rows, const ExpertRanks& to, int64_t tiles, int32_t shares_at_most,
                  void* stream);

}  // namespace tilemoe::cuda
