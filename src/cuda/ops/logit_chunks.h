// Code that the forms of router_logits share (router_logits.cu): the order of tiles and chunks, the
// sum of chunks, and the store of logits.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "cuda/core/fragment.h"
#include "cuda/core/variant.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/kernels/arrays.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/kernels.h"

namespace tilemoe::cuda::logits {

constexpr int64_t kBlockColumns = kTermColumns;  // of a k block
constexpr int64_t kChunkBlocks = 8;
constexpr int64_t kChunkColumns = kChunkBlocks * kBlockColumns;
constexpr int kTerms = kWeightTerms;  // of a float32 weight

// ---------------------------------------------------------------- tiles

// Tile::expert is the chunk, Tile::m_block the number of the tile of logits. The CTAs of a cluster
// have neighbouring rows and the same columns.
template <int kRows, int kCluster = 1>
class ChunkTiles {
 public:
  static constexpr int kTogether = kCluster;

  struct Params {
    int32_t T, n_blocks, tiles, chunks;  // a cluster's tiles count as one
    int32_t k_blocks, last_k_blocks;     // of a chunk, of the last one
    bool split;                          // a CTA takes one chunk, not all of a tile
  };

  static int64_t tiles(int64_t T, int64_t n_blocks) {
    return blocks_of(T, kRows * kCluster) * n_blocks;
  }

  __device__ explicit ChunkTiles(const Params& params)
      : params_(params), index_(static_cast<int32_t>(blockIdx.x) / kCluster) {}

  __device__ bool next(Tile& tile) {
    const int32_t number = params_.split ? index_ % params_.tiles : index_;
    const int32_t chunk = params_.split ? index_ / params_.tiles : chunk_;
    if (number >= params_.tiles || chunk >= params_.chunks) return false;
    const auto rank = static_cast<int32_t>(blockIdx.x) % kCluster;
    tile = {.expert = chunk,
            .row_begin = (number / params_.n_blocks * kCluster + rank) * kRows,
            .row_end = params_.T,
            .n_block = number % params_.n_blocks,
            .k_blocks = chunk + 1 == params_.chunks ? params_.last_k_blocks : params_.k_blocks,
            .m_block = number,
            .multicast_b = kCluster > 1};
    const bool goes_on = !params_.split && chunk + 1 < params_.chunks;
    chunk_ = goes_on ? chunk + 1 : 0;
    if (!goes_on) index_ += static_cast<int32_t>(gridDim.x) / kCluster;
    return true;
  }

 private:
  const Params& params_;
  int32_t index_, chunk_ = 0;
};

// ---------------------------------------------------------------- sums of chunks

// sum = sum + chunk; for all chunks in the same order. The first chunk is the sum.
template <int kNumbers>
__device__ __forceinline__ void add_chunk(float (&sum)[kNumbers], const float (&chunk)[kNumbers],
                                          bool is_first) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) sum[i] = is_first ? chunk[i] : sum[i] + chunk[i];
}

// ---------------------------------------------------------------- the logits

struct Output {
  int32_t T, E;
  FloatArray bias;  // (E); data null: none
  void* logits;     // (T, E)
  tilemoe_dtype dtype;
  int64_t row_stride;  // in elements
  bool by_two;         // two logits may be stored at once

  // Adds the bias to a lane's numbers of a fragment from row and column on, rounds and stores them.
  template <int kNumbers>
  __device__ __forceinline__ void store(float (&sum)[kNumbers], int32_t first_row,
                                        int32_t first_column) const {
    const int32_t row = first_row + fragment::row(0);
#pragma unroll
    for (int j = 0; j < kNumbers / 4; ++j) {
      const int32_t column = first_column + fragment::column(j);
      if (column >= E) break;
      const bool both = column + 1 < E;
      if (bias.data != nullptr) {
        const float low = bias.at(column), high = both ? bias.at(column + 1) : 0.f;
        sum[4 * j] += low, sum[4 * j + 1] += high, sum[4 * j + 2] += low, sum[4 * j + 3] += high;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (row + 8 * half < T)
          put((row + 8 * half) * row_stride + column, sum[4 * j + 2 * half],
              sum[4 * j + 2 * half + 1], both);
    }
  }

 private:
  __device__ __forceinline__ void put(int64_t place, float low, float high, bool both) const {
    if (dtype == TILEMOE_FLOAT32) {
      float* const to = static_cast<float*>(logits) + place;
      if (by_two) {
        *reinterpret_cast<float2*>(to) = {low, high};
      } else {
        to[0] = low;
        if (both) to[1] = high;
      }
    } else {
      auto* const to = static_cast<uint16_t*>(logits) + place;
      const uint32_t word =
          dtype == TILEMOE_BFLOAT16 ? pack(low, high, __nv_bfloat16()) : pack(low, high, __half());
      if (by_two) {
        *reinterpret_cast<uint32_t*>(to) = word;
      } else {
        to[0] = static_cast<uint16_t>(word);
        if (both) to[1] = static_cast<uint16_t>(word >> 16);
      }
    }
  }
};

// ---------------------------------------------------------------- a call, on the host

constexpr TileConfiguration kWide{128, 128}, kNarrow{128, 64}, kFew{16, 32};

// How a call is cut: the results do not depend on it.
struct Cut {
  TileConfiguration tile;
  int64_t n_blocks, chunks;
  bool split;  // several CTAs compute a tile

  Cut(int64_t T, int64_t E, int64_t d, int64_t sms);
};

// A call as the kernels take it.
struct LogitsCall {
  const tilemoe_tensor& X;
  tilemoe_tensor weight;  // in X's dtype, or the terms of a float32 weight
  int terms;              // of the weight
  const Cut& cut;
  Output output;
  tilemoe_tensor rows;  // the logits, if they can be stored by 16 bytes without a bias; or absent
  float4* sums;         // of chunks, unless they are in registers
  Counter* counters;
  void* stream;

  template <class Order>
  typename Order::Params order() const {
    const int64_t blocks = blocks_of(X.shape[1], kBlockColumns);
    return {
        .T = output.T,
        .n_blocks = static_cast<int32_t>(cut.n_blocks),
        .tiles = static_cast<int32_t>(Order::tiles(output.T, cut.n_blocks)),
        .chunks = static_cast<int32_t>(cut.chunks),
        .k_blocks = static_cast<int32_t>(kChunkBlocks * terms),
        .last_k_blocks = static_cast<int32_t>((blocks - (cut.chunks - 1) * kChunkBlocks) * terms),
        .split = cut.split};
  }
};

void launch_sm80(const LogitsCall& call);
// By wgmma, if one CTA computes a tile.
void launch_sm90(const LogitsCall& call);

}  // namespace tilemoe::cuda::logits
