// A block's tile, as a kernel is made for it and as it is chosen among.
#pragma once

namespace tilemoe::cuda {

enum class Schedule {
  kCooperative,  // all consumers work on one tile
  kPingPong,     // two take tiles in turn: one multiplies while the other stores
};

struct TileConfiguration {
  int block_m, block_n;
  Schedule schedule = Schedule::kCooperative;
  int cluster = 1;  // blocks that share what they read of B
  bool operator==(const TileConfiguration&) const = default;
};

}  // namespace tilemoe::cuda
