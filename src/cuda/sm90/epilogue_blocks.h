// What an epilogue reads beside the accumulators, from a consumer's side: blocks that follow a
// tile's k blocks through the ring, so that they are under way while the last products run and the
// next tile's operands follow them. A block's stage is the epilogue's, to write what it stores too,
// until it is released: by every warp, one block later, or by the next tile's products the last.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::sm90 {

template <class Ring, int kStageBytes>
class EpilogueBlocks {
 public:
  __device__ EpilogueBlocks(const Ring& ring, typename Ring::Position& at, uint32_t shared)
      : ring_(ring), at_(at), shared_(shared) {}

  // Where the block lies, which has landed.
  __device__ uint32_t wait() const {
    ring_.wait_full(at_);
    return shared_ + at_.stage * kStageBytes;
  }
  __device__ void release_previous() const { ring_.release(at_.before()); }
  __device__ void advance() { at_.advance(); }

 private:
  const Ring& ring_;
  typename Ring::Position& at_;
  uint32_t shared_;
};

}  // namespace tilemoe::cuda::sm90
