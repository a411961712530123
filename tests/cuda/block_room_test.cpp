// How the mma.sync kit shares a multiprocessor's memory out, for what GPUs have of it.
#include <gtest/gtest.h>

#include "cuda/core/device.h"

namespace tilemoe::cuda::sm80 {
namespace {

constexpr int kTiles = 200;  // bytes of the tiles under way
constexpr int k99 = 99 * 1024, k163 = 163 * 1024, k227 = 227 * 1024;

// A stage of 128 by 256: one block has all registers.
TEST(BlockRoom, OfTheWidestTile) {
  constexpr int kStage = (128 + 256) * 128;
  EXPECT_EQ(block_room(k99, kStage, kTiles, {1, 4}), (BlockRoom{1, 2}));
  EXPECT_EQ(block_room(k163, kStage, kTiles, {1, 4}), (BlockRoom{1, 3}));
  EXPECT_EQ(block_room(k227, kStage, kTiles, {1, 4}), (BlockRoom{1, 4}));
}

// 128 by 128: two blocks, where both have two stages.
TEST(BlockRoom, OfTwoBlocks) {
  constexpr int kStage = (128 + 128) * 128;
  EXPECT_EQ(block_room(k99, kStage, kTiles, {2, 4}), (BlockRoom{1, 3}));
  EXPECT_EQ(block_room(k163, kStage, kTiles, {2, 4}), (BlockRoom{2, 2}));
  EXPECT_EQ(block_room(k227, kStage, kTiles, {2, 4}), (BlockRoom{2, 3}));
}

// What all blocks take, with what the system takes of each, is what there is.
TEST(BlockRoom, IsNoMoreThanThereIs) {
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

TEST(BlockRoom, IsNoneWhereTwoStagesDoNotFit) {
  EXPECT_EQ(block_room(k99, 64 * 1024, kTiles, {1, 4}), BlockRoom{});
}

}  // namespace
}  // namespace tilemoe::cuda::sm80
