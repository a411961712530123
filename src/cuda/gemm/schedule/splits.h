// Split-K of the weight gradients: the reference tiles, the splits of long experts, and their
// ranks.
//
// A split changes the bits of a sum. So splits are defined on tiles of one size for all kernels:
// the tile of a kernel lies in one half of a reference tile and inherits its splits. The size is
// the largest that a kernel takes at a time, that of the two CTAs of a Hopper cluster, since each
// split sends up to two partial sums of this size through memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/numbers.h"
#include "core/step_arguments.h"

namespace tilemoe::cuda {

struct DeviceInfo;

// Rows of an expert that are cut together: one k block, or several of a kernel that has smaller
// ones.
constexpr int32_t kSumRows = 64;

// Dense columns of a reference tile: 192 if these waste so much less than 256 that it outweighs the
// lower speed of tiles of 192. In the input gradient they took 7 and 13 % longer if neither wastes
// columns, 5 % less if 256 wastes a fifteenth.
constexpr int column_block(int64_t columns) {
  const int64_t narrow = (columns + 191) / 192 * 192, wide = (columns + 255) / 256 * 256;
  return 20 * narrow <= 19 * wide ? 192 : 256;
}

// The columns of a narrow tile. So few dense columns are one block in either width: the reference
// tiles, and with them the splits, are the same.
constexpr int kNarrowColumns = 64;

// Of D, the transposed gradient: (d, parts * dense columns). A reference tile is two halves, 256
// rows of D in all by column_block() columns of a part; of an odd last block of 128 rows, two
// blocks of columns make one. Groups of kGroup blocks of columns ascend; within a group, blocks of
// rows; and within these, the group's columns. So tiles that are under way at one time sum over the
// same rows, which come from L2 but for the first of them.
struct ReferenceTiles {
  static constexpr int32_t kRows = 128;     // of a half
  static constexpr int32_t kColumns = 256;  // at most
  static constexpr int32_t kGroup = 8;

  int32_t m_blocks;  // of kRows rows
  int32_t n_blocks;  // of column_block() columns of a part

  static constexpr ReferenceTiles of(int64_t d, int64_t dense_columns, int parts) {
    const int64_t block = column_block(dense_columns);
    return {static_cast<int32_t>((d + kRows - 1) / kRows),
            static_cast<int32_t>(parts * ((dense_columns + block - 1) / block))};
  }

  // Of one expert.
  constexpr int64_t count() const {
    return int64_t{m_blocks / 2} * n_blocks + m_blocks % 2 * ((n_blocks + 1) / 2);
  }

  struct Half {
    int32_t m_block, n_block;
    bool same_columns;  // as the other half
  };
  // Half 0 or 1 of reference tile `number`.
  TILEMOE_HOST_DEVICE Half half(int32_t number, int32_t which) const {
    const int32_t together = m_blocks / 2;
    if (number >= together * n_blocks) {
      const int32_t n_block = (number - together * n_blocks) * 2 + which;
      // A block of columns too many has rows past the last, of which none is read or stored.
      if (n_block == n_blocks) return {m_blocks, n_blocks - 1, false};
      return {m_blocks - 1, n_block, false};
    }
    const Block place = in_groups(number, together);
    return {place.m_block * 2 + which, place.n_block, true};
  }

  // The blocks of a kernel whose CTAs compute 256 rows: those of an odd last block of 128 rows are
  // half empty. As each has 256 rows, all take the same time. So the CTAs stay in step, and
  // their operands come from L2 but for the first that reads them. A CTA with two of the last
  // blocks, which make one reference tile, would fall a tile behind.
  struct Block {
    int32_t m_block, n_block;  // of 2 * kRows rows
  };
  TILEMOE_HOST_DEVICE int32_t whole_blocks() const { return (m_blocks + 1) / 2 * n_blocks; }
  TILEMOE_HOST_DEVICE Block whole_block(int32_t number) const {
    return in_groups(number, (m_blocks + 1) / 2);
  }

 private:
  // In the order of groups of columns; `together`: blocks of 2 * kRows rows.
  TILEMOE_HOST_DEVICE Block in_groups(int32_t number, int32_t together) const {
    const int32_t group = number / (together * kGroup);
    const int32_t first_n = group * kGroup;
    const int32_t in_group = number - first_n * together;
    const int32_t width = n_blocks - first_n < kGroup ? n_blocks - first_n : kGroup;
    const int32_t m_block = in_group / width;
    return {m_block, first_n + in_group - m_block * width};
  }
};

// Which experts count as long in a weight gradient, and how they are split. It depends on the
// counts of rows, the size of the GEMM and the number of workers, an argument of the step, but on
// no tile and no number of clusters, since splits change the bits of a sum.

// An expert is long if one of its reference tiles is more than 1 / kOfAnAverage of a worker's
// average work; but the sum of a short split is not worth a round trip through memory.
constexpr int64_t kOfAnAverage = 4;
constexpr int32_t kShortSum = 1024;
constexpr int32_t kMinSplit = 8;  // k blocks

// Whether a tile of an expert with `rows` rows, of M rows in all, is long compared with the work of
// all tiles divided by the splits. Each expert has the same number of tiles.
TILEMOE_HOST_DEVICE bool is_long(int64_t rows, int64_t M, int64_t tiles, int64_t splits) {
  return rows > kShortSum && rows * kOfAnAverage * splits > M * tiles;
}

// The maximum number of splits of the work on long experts; 0: no expert counts as long. `tiles`
// are of an expert, which has at most `max_rows` of the `capacity` rows. None counts as long if
// a longer split would not, with all rows in use: with fewer rows in use some experts are not split.
inline int32_t max_splits(int64_t tiles, int64_t capacity, int64_t max_rows, int32_t workers) {
  // Of `blocks` k blocks in all, no more than all have a tile that long.
  const int64_t blocks = capacity / kSumRows + capacity / kShortSum;
  if (capacity <= kShortSum || tiles >= kOfAnAverage * workers || blocks > INT32_MAX / tiles)
    return 0;
  const int64_t splits = std::min<int64_t>(workers, tiles * blocks / kMinSplit);
  if (splits < 2) return 0;  // nothing to split
  return is_long(max_rows, capacity, tiles, splits) ? static_cast<int32_t>(splits) : 0;
}

// The reference tiles of long experts by rank, number and k block, as one line of k blocks that is
// cut into equal splits. A tile that the border of a split cuts has a partial sum on either side;
// so a split has at most two, one at each end.
struct Splits {
  int32_t k_blocks = 0, count = 0;

  TILEMOE_HOST_DEVICE static Splits of(int32_t k_blocks, int32_t max_splits) {
    const int32_t worth_it = k_blocks / kMinSplit;
    return {k_blocks, worth_it < max_splits ? worth_it : max_splits};
  }
  // First k block of a split; for the one past the last, the end.
  TILEMOE_HOST_DEVICE int32_t begin(int32_t split) const {
    if (split >= count) return k_blocks;
    const int32_t longer = k_blocks % count;
    return split * (k_blocks / count) + (split < longer ? split : longer);
  }
  // The index of the partial sum at one end of a split, counted over all splits.
  TILEMOE_HOST_DEVICE static int32_t partial_sum(int32_t split, bool at_its_end) {
    return 2 * split + (at_its_end ? 1 : 0);
  }
};

// Experts in the order of the weight gradients, longest first; the long experts; and the scratch
// for both.

struct RankedExpert {
  int32_t expert;
  int32_t begin, end;     // its rows
  int32_t blocks_before;  // k blocks of the experts of smaller rank
};

// The experts of the first `count` ranks, with `k_blocks` in all.
struct LongExperts {
  int32_t count, k_blocks;
};

// In a step's scratch, one after the other.
struct ExpertRanks {
  LongExperts* long_experts;  // (1)
  RankedExpert* ranked;       // (E)
  void* partial_sums;         // (2 per split) reference tiles of float32

  static size_t bytes(int64_t E, int32_t splits) {
    constexpr size_t kTileBytes =
        size_t{2} * ReferenceTiles::kRows * ReferenceTiles::kColumns * sizeof(float);
    return kHead + static_cast<size_t>(E) * sizeof(RankedExpert) +
           2 * static_cast<size_t>(splits) * kTileBytes;
  }
  static ExpertRanks in(const Scratch& scratch, int64_t E) {
    auto* const head = static_cast<std::byte*>(scratch.data);
    auto* const ranked = reinterpret_cast<RankedExpert*>(head + kHead);
    return {reinterpret_cast<LongExperts*>(head), ranked, ranked + E};
  }

 private:
  static constexpr size_t kHead = 16;
};

// Fills in both; `tiles` are reference tiles of an expert.
void rank_experts(const DeviceInfo& device, const Rows& rows, const ExpertRanks& to, int64_t tiles,
                  int32_t max_splits, void* stream);

}  // namespace tilemoe::cuda
