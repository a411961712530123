// The reference tiles of a weight gradient: where the sums over a long expert's rows are cut.
//
// A cut changes a sum's bits. So cuts are made on tiles of one size, whatever the kernels' are: a
// kernel's tile lies in one half of a reference tile and inherits the cuts of the whole. The size
// is that of the most that any kernel takes at a time, a Hopper cluster's two blocks, and no more,
// since a share of the work sends up to two partial sums of this size through memory.
#pragma once

#include <cstdint>

#include "routing/host_device.h"

namespace tilemoe::cuda {

// Rows of an expert that are cut together: one k block, or several of a kernel that has smaller
// ones.
constexpr int32_t kSumRows = 64;

// Dense columns of a reference tile: 192 where these waste so many fewer than 256 that it makes up
// for what tiles of 192 do slower. Of the input gradient they took 7 and 13 % longer where neither
// wastes any, 5 % less where 256 wastes a fifteenth.
constexpr int column_block(int64_t columns) {
  const int64_t narrow = (columns + 191) / 192 * 192, wide = (columns + 255) / 256 * 256;
  return 20 * narrow <= 19 * wide ? 192 : 256;
}

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
  // Half 0 or 1 of the reference tile of that number.
  TILEMOE_HOST_DEVICE Half half(int32_t number, int32_t which) const {
    const int32_t together = m_blocks / 2;
    if (number >= together * n_blocks) {
      const int32_t n_block = (number - together * n_blocks) * 2 + which;
      // A block of columns too many has rows past the last, of which none is read or stored.
      if (n_block == n_blocks) return {m_blocks, n_blocks - 1, false};
      return {m_blocks - 1, n_block, false};
    }
    const int32_t group = number / (together * kGroup);
    const int32_t first_n = group * kGroup;
    const int32_t in_group = number - first_n * together;
    const int32_t width = n_blocks - first_n < kGroup ? n_blocks - first_n : kGroup;
    const int32_t m_step = in_group / width;
    return {m_step * 2 + which, first_n + in_group - m_step * width, true};
  }
};

}  // namespace tilemoe::cuda
