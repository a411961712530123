// A routing from pairs: a counting sort by expert that keeps the order of the pairs, in two
// launches. The first counts the experts of every block of pairs; in the second each block adds up
// what stands before its own and places them. No place depends on the order in which blocks or
// threads run.
#pragma once

#include "cuda/kernels/arrays.h"
#include "routing/spec.h"

namespace tilemoe::cuda {

constexpr int32_t kSkipped = -1;  // an id outside [0, E)
constexpr int32_t kNoPair = -2;   // past the last pair

// The pairs in their order.
struct Pairs {
  IntegerArray experts;   // (count) any number
  FloatArray scores;      // (count)
  const int32_t* tokens;  // (count), ascending; null: K pairs a token
  int32_t K;
  int32_t E;
  int64_t count;

  __device__ __forceinline__ int32_t expert(int64_t pair) const { return judged(experts.at(pair)); }
  // Pairs first, first + step, ... before `end`: all loads are in flight together.
  template <int kCount>
  __device__ __forceinline__ void load_experts(int64_t first, int64_t step, int64_t end,
                                               int32_t (&out)[kCount]) const {
    if (experts.wide)
      load_experts(static_cast<const int64_t*>(experts.data), first, step, end, out);
    else
      load_experts(static_cast<const int32_t*>(experts.data), first, step, end, out);
  }
  __device__ __forceinline__ int32_t token(int64_t pair) const {
    return tokens != nullptr
               ? tokens[pair]
               : static_cast<int32_t>(static_cast<uint32_t>(pair) / static_cast<uint32_t>(K));
  }
  __device__ __forceinline__ bool is_nan(int64_t pair) const {
    const float score = scores.at(pair);
    return score != score;
  }

 private:
  __device__ __forceinline__ int32_t judged(int64_t id) const {
    return id >= 0 && id < E ? static_cast<int32_t>(id) : kSkipped;
  }
  template <class Id, int kCount>
  __device__ __forceinline__ void load_experts(const Id* ids, int64_t first, int64_t step,
                                               int64_t end, int32_t (&out)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t pair = first + i * step;
      out[i] = pair < end ? judged(ids[pair]) : kNoPair;
    }
  }
};

// Pairs cut into blocks: by the problem alone.
struct PairBlocks {
  int64_t size;  // a multiple of kPairsAtOnce
  int64_t count;

  static constexpr int64_t kPairsAtOnce = 512;
  static constexpr int64_t kMaxBlocks = 128;  // about the SMs of a Hopper GPU

  explicit PairBlocks(const tilemoe_routing_spec& spec) {
    // A block of at least E pairs keeps the table of counts no larger than the pairs themselves.
    const int64_t even = (spec.pairs + kMaxBlocks - 1) / kMaxBlocks;
    const int64_t min_size = even > spec.E ? even : spec.E;
    size = (min_size + kPairsAtOnce - 1) / kPairsAtOnce * kPairsAtOnce;
    count = spec.pairs > size ? (spec.pairs + size - 1) / size : 1;
  }
};

struct PairScratch {
  PairBlocks blocks;
  int32_t* counts;   // (blocks, E + 2): pairs of an expert; then skipped ones, tokens with a NaN
  int32_t* largest;  // general: (blocks) the largest token in range
  int32_t* tokens;   // general: (pairs) a pair's token, or the one before where it is skipped
  int32_t* experts;  // general: (pairs)

  PairScratch(const tilemoe_routing_spec& spec, ScratchLayout& layout) : blocks(spec) {
    const bool general = spec.kind == TILEMOE_ROUTING_GENERAL;
    counts = layout.take<int32_t>(blocks.count * (spec.E + 2));
    largest = layout.take<int32_t>(general ? blocks.count : 0);
    tokens = layout.take<int32_t>(general ? spec.pairs : 0);
    experts = layout.take<int32_t>(general ? spec.pairs : 0);
  }
};

// Fills offsets, counters, row_token, row_score and pair_row.
void sort_pairs(const DeviceInfo& device, const Pairs& pairs, const PairScratch& scratch,
                const tilemoe_routing& routing, void* stream);

}  // namespace tilemoe::cuda
