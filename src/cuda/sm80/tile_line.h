// The tiles of a block, from the first warp, which looks for them, to all: as many as may be under
// way when each has one k block. Where it has come to in their order lies in shared memory too: it
// would take registers that the products need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "cuda/core/tile.h"
#include "cuda/core/warp.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared_address.h"
#include "cuda/sm80/ring.h"

namespace tilemoe::cuda::sm80 {

constexpr int32_t kNoTile = 0;  // k blocks: the order has come to its end

// A place in the line, and how often it has gone round, by parity: both in one register.
class LinePosition {
 public:
  __device__ uint32_t slot() const { return place_ / 2; }
  __device__ uint32_t parity() const { return place_ % 2; }
  __device__ void advance(uint32_t slots) {
    place_ += 2;
    if (slot() == slots) place_ = parity() ^ 1;
  }

 private:
  uint32_t place_ = 0;
};

template <class Order, int kMostStages>
class TileLine {
 public:
  // By one thread.
  __device__ void init() {
    for (uint64_t& told : told_) ptx::mbarrier_init(ptx::shared_address(&told), 1);
  }
  // By the first warp.
  __device__ void begin(const typename Order::Params& params) {
    new (lanes_[threadIdx.x].order) Order(params);
  }
  __device__ void find_next(const LinePosition& at) {
    auto& lane = *reinterpret_cast<Order*>(lanes_[threadIdx.x].order);
    Order order = lane;
    Tile tile{};
    if (!order.next(tile)) tile.k_blocks = kNoTile;
    new (&lane) Order(order);
    if (threadIdx.x > 0) return;
    tiles_[at.slot()] = tile;
    ptx::mbarrier_arrive(ptx::shared_address(&told_[at.slot()]));
  }

  // By every warp: the tile, once it is there.
  __device__ const Tile& wait(const LinePosition& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&told_[at.slot()]), at.parity());
    return tiles_[at.slot()];
  }
  // Of what has been waited for.
  __device__ const Tile& tile(const LinePosition& at) const { return tiles_[at.slot()]; }

  __device__ static void advance(LinePosition& at) { at.advance(kSlots); }

 private:
  // A warp stores a tile while others copy what lies a whole ring ahead of it, and the tile after
  // that is looked for.
  static constexpr int kSlots = kMostStages + 3;

  struct alignas(Order) Lane {
    std::byte order[sizeof(Order)];
  };

  uint64_t told_[kSlots];
  Tile tiles_[kSlots];
  Lane lanes_[kWarp];
};

}  // namespace tilemoe::cuda::sm80
