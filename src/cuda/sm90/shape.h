// The block's tile and how the two consumer warpgroups share it, with everything that follows from
// them at compile time.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/slab.h"
#include "cuda/core/tile_configuration.h"
#include "cuda/core/warp.h"
#include "cuda/load/loader.h"

namespace tilemoe::cuda::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kBlockThreads = (1 + kConsumers) * kWarpgroup;  // the producer comes first
static_assert(kWarpgroup == load::kProducerThreads);

// 65536 registers over 384 threads are 168 a thread at launch; what the producer gives back, the
// consumers take: 40 + 2 * 232 = 3 * 168.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168);

constexpr int kSharedBytes = 227 * 1024;  // of a block
constexpr int kSwizzleAtom = 1024;        // 8 rows of 128 bytes: what shared tiles are aligned to

// A cluster's blocks work side by side on tiles of neighbouring rows and share what they read of B.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  using Out = typename Recipe::Out;    // that is stored
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr Schedule kSchedule = kTile.schedule;
  static constexpr int kCluster = kTile.cluster;
  static constexpr bool kFewRows = BLOCK_M < 128;

  // Of one consumer: rows, instructions of 64 rows each, and how many consumers a stage is read by.
  static constexpr int kRows = kSchedule == Schedule::kCooperative ? BLOCK_M / kConsumers : BLOCK_M;
  static constexpr int kSlabs = kRows / 64;  // a warp has 16 rows of each instruction's
  static constexpr int kReaders = kSchedule == Schedule::kCooperative ? kConsumers : 1;

  static_assert(sizeof(Element) == sizeof(typename Recipe::B), "one swizzle for both operands");
  static_assert(kCluster == 1 || kCluster == 2, "B is brought in halves");
  static_assert(kRows % 64 == 0, "an instruction multiplies 64 rows");
  static_assert(kSlabs * BLOCK_N / 2 <= 192, "accumulators leave no registers for the epilogue");

  // First row of this warp's slab, counted from the consumer's first; its columns are the tile's.
  __device__ static int32_t slab_row(int index) { return slab_row(index, threadIdx.x); }
  __device__ static int32_t slab_row(int index, std::integral auto thread) {
    return index * 64 + static_cast<int32_t>(thread % kWarpgroup / kWarp) * slab::kRows;
  }
};

}  // namespace tilemoe::cuda::sm90
