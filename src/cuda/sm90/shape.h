// The block's tile and how the two consumer warpgroups share it, with everything that follows from
// them at compile time.
#pragma once

#include <cstdint>

namespace tilemoe::cuda {

enum class Schedule {
  kCooperative,  // both consumers work on one tile, half of its rows each
  kPingPong,     // they take tiles in turn: one multiplies while the other stores
};

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kBlockThreads = (1 + kConsumers) * kWarpgroup;  // the producer comes first

// 65536 registers over 384 threads are 168 a thread at launch; what the producer gives back, the
// consumers take: 40 + 2 * 232 = 3 * 168.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168);

constexpr int kSharedBytes = 227 * 1024;  // of a block
constexpr int kSwizzleAtom = 1024;        // 8 rows of 128 bytes: what shared tiles are aligned to

// `kCluster_` blocks work side by side on tiles of neighbouring rows and share what they read of B.
template <class Element_, int kBlockM, int kBlockN, Schedule kSchedule_, int kCluster_ = 1>
struct TileShape {
  using Element = Element_;
  static constexpr int BLOCK_M = kBlockM;
  static constexpr int BLOCK_N = kBlockN;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr int kCluster = kCluster_;

  // Of one consumer: rows, instructions of 64 rows each, and how many consumers a stage is read by.
  static constexpr int kRows = kSchedule == Schedule::kCooperative ? BLOCK_M / kConsumers : BLOCK_M;
  static constexpr int kSubtiles = kRows / 64;
  static constexpr int kReaders = kSchedule == Schedule::kCooperative ? kConsumers : 1;

  static_assert(kCluster == 1 || kCluster == 2, "B is brought in halves");
  static_assert(kRows % 64 == 0, "an instruction multiplies 64 rows");
  static_assert(kSubtiles * BLOCK_N / 2 <= 192, "accumulators leave no registers for the epilogue");
};

// D (64, BLOCK_N) of each instruction; see ptx/wgmma.h for which element is where.
template <class Shape>
using Accumulators = float[Shape::kSubtiles][Shape::BLOCK_N / 2];

}  // namespace tilemoe::cuda
