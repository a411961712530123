// The distribution of an SM's shared memory to CTAs in the mma.sync kernels, for the sizes of GPUs.
#include <gtest/gtest.h>

#include "cuda/core/device.h"

namespace tilemoe::cuda::sm80 {
namespace {

constexpr int kTiles = 200;  // bytes of the tiles under way
constexpr int k99 = 99 * 1024, k163 = 163 * 1024, k227 = 227 * 1024;

// A stage of 128 by 256: one CTA has all registers.
TEST(BlockRoom, OfTheWidestTile) {
  constexpr int kStage = (128 + 256) * 128;
  EXPECT_EQ(block_room(k99, kStage, kTiles, {1, 4}), (BlockRoom{1, 2}));
  EXPECT_EQ(block_room(k163, kStage, kTiles, {1, 4}), (BlockRoom{1, 3}));
  EXPECT_EQ(block_room(k227, kStage, kTiles, {1, 4}), (BlockRoom{1, 4}));
}

// 128 by 128: two CTAs, if both have two stages.
TEST(BlockRoom, OfTwoCtas) {
  constexpr int kStage = (128 + 128) * 128;
  EXPECT_EQ(block_room(k99, kStage, kTiles, {2, 4}), (BlockRoom{1, 3}));
  EXPECT_EQ(block_room(k163, kStage, kTiles, {2, 4}), (BlockRoom{2, 2}));
  EXPECT_EQ(block_room(k227, kStage, kTiles, {2, 4}), (BlockRoom{2, 3}));
}

// The CTAs' shared memory, with the part that the system reserves per CTA, fits the SM.
TEST(BlockRoom, FitsTheSm) {
  for (const int own : {k99, k163, k227})
    for (int stage = 4096; stage <= 49152; stage += 4096)
      for (int blocks = 1; blocks <= 8; ++blocks) {
        const BlockRoom room = block_room(own, stage, kTiles, {blocks, 4});
        const int each = room.stages * stage + kTiles;
        ASSERT_GE(room.stages, 2);
        ASSERT_LE(room.stages, 4);
        ASSERT_LE(room.blocks, blocks);
        EXPECT_LE(each, own);
        EXPECT_LE(room.blocks * (each + 1024), own + 1024) << own << " " << stage << " " << blocks;
      }
}

TEST(BlockRoom, IsNoneIfTwoStagesDoNotFit) {
  EXPECT_EQ(block_room(k99, 64 * 1024, kTiles, {1, 4}), BlockRoom{});
}

}  // namespace
}  // namespace tilemoe::cuda::sm80
