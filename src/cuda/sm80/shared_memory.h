// How a multiprocessor's shared memory is used: GPUs of one kit have 99, 163 or 227 KiB of it for a
// block.
#pragma once

#include "cuda/core/device.h"

namespace tilemoe::cuda::sm80 {

// Blocks of a multiprocessor at a time, and the stages of each.
struct BlockRoom {
  int blocks, stages;
  bool operator==(const BlockRoom&) const = default;
};

// As many blocks as may be wanted that have two stages each, and as many stages as these have room
// for, at most those wanted. `block_bytes` are what one block may have. No stages: no room.
constexpr BlockRoom block_room(int block_bytes, int stage_bytes, int other_bytes,
                               const BlockRoom& wanted) {
  constexpr int kOfTheSystem = 1024;  // of each block; all blocks share what one has with it
  for (int blocks = wanted.blocks; blocks > 0; --blocks) {
    const int own = (block_bytes + kOfTheSystem) / blocks - kOfTheSystem;
    const int stages = (own - other_bytes) / stage_bytes;
    if (stages >= 2) return {blocks, stages < wanted.stages ? stages : wanted.stages};
  }
  return {};
}

// What a block may have on the device; at most TILEMOE_SHARED_KIB, where that is set: with it, a
// GPU runs the code of one that has less.
int shared_bytes_of_block(const DeviceInfo& device);

}  // namespace tilemoe::cuda::sm80
