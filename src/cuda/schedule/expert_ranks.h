// Experts in the order in which the weight gradients take them, longest first; those that are long;
// and the scratch where both are told.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend.h"
#include "cuda/schedule/shares.h"

namespace tilemoe::cuda {

struct RankedExpert {
  int32_t expert;
  int32_t begin, end;     // its rows
  int32_t blocks_before;  // k blocks of the experts of smaller rank
};

// The experts of the first `count` ranks, with `k_blocks` in all.
struct LongExperts {
  int32_t count, k_blocks;
};

// In a step's scratch, one after the other.
struct ExpertRanks {
  LongExperts* long_experts;  // (1)
  RankedExpert* ranked;       // (E)
  void* partial_sums;         // (2 a share) reference tiles of float32

  static size_t bytes(int64_t E, int32_t shares) {
    constexpr size_t kTileBytes =
        size_t{2} * ReferenceTiles::kRows * ReferenceTiles::kColumns * sizeof(float);
    return kHead + static_cast<size_t>(E) * sizeof(RankedExpert) +
           2 * static_cast<size_t>(shares) * kTileBytes;
  }
  static ExpertRanks in(const Scratch& scratch, int64_t E) {
    auto* const head = static_cast<std::byte*>(scratch.data);
    auto* const ranked = reinterpret_cast<RankedExpert*>(head + kHead);
    return {reinterpret_cast<LongExperts*>(head), ranked, ranked + E};
  }

 private:
  static constexpr size_t kHead = 16;
};

// Fills in both; `tiles` are reference tiles of an expert.
void rank_experts(const Rows& rows, const ExpertRanks& to, int64_t tiles, int32_t most_shares,
                  void* stream);

}  // namespace tilemoe::cuda
