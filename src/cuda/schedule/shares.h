// Which experts count as long in a weight gradient, and how the work on them is cut. It follows
// from the counts of rows, the product's size and the number of workers, an argument of the step:
// no tile and no number of clusters has a say in it, since cuts change a sum's bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/schedule/reference_tiles.h"
#include "routing/host_device.h"

namespace tilemoe::cuda {

// An expert is long where one of its reference tiles is more than 1 / kOfAnAverage of a worker's
// average work; but a sum over few rows is not worth the way through memory.
constexpr int64_t kOfAnAverage = 4;
constexpr int32_t kFewRows = 1024;
constexpr int32_t kLeastShare = 8;  // k blocks

// Whether a tile of an expert of so many rows, among M rows of which each expert has as many tiles,
// is long beside all tiles' work spread over the shares.
TILEMOE_HOST_DEVICE bool is_long(int64_t rows, int64_t M, int64_t tiles, int64_t shares) {
  return rows > kFewRows && rows * kOfAnAverage * shares > M * tiles;
}

// Shares that the work on long experts is cut into at most; 0: no expert counts as long. `tiles`
// are of an expert, which has at most `most_rows` of the `capacity` rows. None counts as long where
// one with that many would not, all rows in use: with fewer in use some then go uncut.
inline int32_t shares_at_most(int64_t tiles, int64_t capacity, int64_t most_rows, int32_t workers) {
  // Of `blocks` k blocks in all, no more than all have a tile that long.
  const int64_t blocks = capacity / kSumRows + capacity / kFewRows;
  if (capacity <= kFewRows || tiles >= kOfAnAverage * workers || blocks > INT32_MAX / tiles)
    return 0;
  const int64_t shares = std::min<int64_t>(workers, tiles * blocks / kLeastShare);
  if (shares < 2) return 0;  // nothing to share
  return is_long(most_rows, capacity, tiles, shares) ? static_cast<int32_t>(shares) : 0;
}

// The reference tiles of long experts by rank, number and k block, as one line of k blocks that is
// cut into equal shares. A tile that a share's border cuts has a partial sum on either side; so a
// share has two at most, one at each end.
struct Shares {
  int32_t k_blocks = 0, count = 0;

  TILEMOE_HOST_DEVICE static Shares of(int32_t k_blocks, int32_t at_most) {
    const int32_t worth_it = k_blocks / kLeastShare;
    return {k_blocks, worth_it < at_most ? worth_it : at_most};
  }
  // First k block of a share; of one past the last, the end.
  TILEMOE_HOST_DEVICE int32_t begin(int32_t share) const {
    if (share >= count) return k_blocks;
    const int32_t longer = k_blocks % count;
    return share * (k_blocks / count) + (share < longer ? share : longer);
  }
  // Where the partial sum at one end of a share has its place, counted over all shares.
  TILEMOE_HOST_DEVICE static int32_t partial_sum(int32_t share, bool at_its_end) {
    return 2 * share + (at_its_end ? 1 : 0);
  }
};

}  // namespace tilemoe::cuda
