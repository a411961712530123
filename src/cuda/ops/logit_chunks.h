// The logits of a router as tiles of the chapter sm80 (router_logits.cu): the order of tiles and
// chunks, the operands, and the sum of chunks.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/sm80_epilogues.h"
#include "cuda/gemm/load/sm80_rows.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm80.h"
#include "cuda/kernels/arrays.h"
#include "cuda/kernels/block.h"

namespace tilemoe::cuda::logits {

constexpr int64_t kBlockColumns = 64;  // of a k block
constexpr int64_t kChunkBlocks = 16;
constexpr int64_t kChunkColumns = kChunkBlocks * kBlockColumns;
constexpr int kTerms = 3;  // of a float32 weight

// ---------------------------------------------------------------- tiles

// Tile::expert is the chunk, Tile::m_block the number of the tile of logits.
template <class Shape>
class ChunkTiles {
 public:
  static constexpr int kTogether = 1;

  struct Params {
    int32_t T, n_blocks, tiles, chunks;
    int32_t k_blocks, last_k_blocks;  // of a chunk, of the last one
    bool split;                       // a CTA takes one chunk, not all of a tile
  };

  __device__ explicit ChunkTiles(const Params& params)
      : params_(params), index_(static_cast<int32_t>(blockIdx.x)) {}

  __device__ bool next(Tile& tile) {
    const int32_t number = params_.split ? index_ % params_.tiles : index_;
    const int32_t chunk = params_.split ? index_ / params_.tiles : chunk_;
    if (number >= params_.tiles || chunk >= params_.chunks) return false;
    tile = {.expert = chunk,
            .row_begin = number / params_.n_blocks * Shape::BLOCK_M,
            .row_end = params_.T,
            .n_block = number % params_.n_blocks,
            .k_blocks = chunk + 1 == params_.chunks ? params_.last_k_blocks : params_.k_blocks,
            .m_block = number};
    const bool goes_on = !params_.split && chunk + 1 < params_.chunks;
    chunk_ = goes_on ? chunk + 1 : 0;
    if (!goes_on) index_ += static_cast<int32_t>(gridDim.x);
    return true;
  }

 private:
  Params params_;
  int32_t index_, chunk_ = 0;
};

// ---------------------------------------------------------------- operands

// A matrix of rows as an operand, K-major. Rows and columns past the last are zeros.
struct OperandRows {
  const char* data;
  uint32_t row_bytes;  // from one row to the next
  int32_t rows, width_bytes, chunk_bytes;
  bool repeats;  // each k block is multiplied kTerms times

  static OperandRows of(const tilemoe_tensor& matrix, bool repeats) {
    const auto element = static_cast<int64_t>(tilemoe_dtype_size(matrix.dtype));
    return {
        .data = static_cast<const char*>(matrix.data),
        .row_bytes = matrix.shape[0] > 1 ? static_cast<uint32_t>(matrix.stride[0] * element) : 0,
        .rows = static_cast<int32_t>(matrix.shape[0]),
        .width_bytes = static_cast<int32_t>(matrix.shape[1] * element),
        .chunk_bytes = static_cast<int32_t>(kChunkColumns * element),
        .repeats = repeats};
  }
};

// Operand A (tokens) or B (experts) of a chunk.
template <class Shape, bool kIsA>
class ChunkRows {
 public:
  static constexpr int kRows = kIsA ? Shape::BLOCK_M : Shape::BLOCK_N;
  using Operand = StagedOperand<Major::kK, kRows>;
  using Params = OperandRows;

  __device__ ChunkRows(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    const int32_t row = (kIsA ? tile.row_begin : tile.n_block * kRows) + stage_.row();
    const int32_t byte = tile.expert * params_.chunk_bytes + stage_.byte();
    from_ = params_.data + int64_t{row} * params_.row_bytes + byte;
    rows_left_ = params_.rows - row;
    bytes_left_ = params_.width_bytes - byte;
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t /*blocks_left*/) const {
    const uint32_t pass_bytes = params_.row_bytes * Stage::kAtOnce;
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i)
      stage_.copy(shared, i, from_ + static_cast<uint64_t>(pass_bytes) * static_cast<uint32_t>(i),
                  bytes_left_ > 0 && rows_left_ > i * Stage::kAtOnce);
  }
  __device__ __forceinline__ void advance(int32_t blocks_left) {
    if (params_.repeats && (blocks_left - 1) % kTerms != 0) return;
    from_ += Stage::kRowBytes;
    bytes_left_ -= Stage::kRowBytes;
  }

 private:
  using Stage = sm80::StageRows<Shape::kThreads, kRows>;

  const Params& params_;
  Stage stage_;
  const char* from_;  // this thread's piece of the next k block, in its first row
  int32_t rows_left_, bytes_left_;
};

// ---------------------------------------------------------------- sums of chunks

template <class Shape>
class LogitsEpilogue {
 public:
  // A thread's numbers of a tile, as they are in scratch: 16 bytes of all threads, then the next.
  static constexpr int kVectors = Shape::kFragments * Shape::kWarpColumns / 8;

  struct Params {
    float4* sums;       // split (chunks, tiles, kVectors, threads), else (CTAs, kVectors, threads)
    Counter* counters;  // split: (tiles, warps)
    Counter stamp;
    int32_t T, E, tiles, chunks;
    bool split;
    FloatArray bias;  // (E); data null: none
    void* logits;
    tilemoe_dtype dtype;
    int64_t row_stride;  // of logits, in elements
    bool by_two;         // two logits may be stored at once
  };

  __device__ explicit LogitsEpilogue(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.row_begin + Shape::fragment_row(0) < params_.T &&
           tile.n_block * Shape::BLOCK_N + Shape::fragment_column() < params_.E;
  }

  __device__ __forceinline__ void store(sm80::Accumulators<Shape>& D, const Tile& tile) const {
    if (!wants(tile)) return;
    if (params_.split && params_.chunks > 1)
      store_chunk(D, tile);
    else
      add_chunk(D, tile);
  }

 private:
  using Fragment = sm80::OneFragment<Shape>;
  static constexpr int kFragmentVectors = kVectors / Shape::kFragments;

  // The thread's vectors of fragment m at a place in scratch, kThreads apart.
  __device__ float4* vectors(int32_t place, int m) const {
    return params_.sums + (int64_t{place} * kVectors + m * kFragmentVectors) * Shape::kThreads +
           threadIdx.x;
  }
  __device__ __forceinline__ static void keep(const Fragment& fragment, float4* to) {
    const float(&d)[Shape::kWarpColumns / 2] = fragment[0];
#pragma unroll
    for (int i = 0; i < kFragmentVectors; ++i)
      to[i * Shape::kThreads] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
  }
  __device__ __forceinline__ static void read(const float4* from, Fragment& fragment) {
#pragma unroll
    for (int i = 0; i < kFragmentVectors; ++i)
      reinterpret_cast<float4&>(fragment[0][4 * i]) = __ldcg(from + i * Shape::kThreads);
  }
  // chunk = sum + chunk: for all chunks in the same order.
  __device__ __forceinline__ static void add(const Fragment& sum, Fragment& chunk) {
#pragma unroll
    for (int i = 0; i < Shape::kWarpColumns / 2; ++i) chunk[0][i] = sum[0][i] + chunk[0][i];
  }

  // Adds the chunk to those before it. After the last one, stores the logits.
  __device__ __forceinline__ void add_chunk(sm80::Accumulators<Shape>& D, const Tile& tile) const {
    const bool is_last = tile.expert + 1 == params_.chunks;
    sm80::for_each_fragment<Shape>(D, [&](int m, Fragment& fragment) {
      float4* const own = vectors(static_cast<int32_t>(blockIdx.x), m);
      if (tile.expert > 0) {
        Fragment sum;
        read(own, sum);
        add(sum, fragment);
      }
      if (is_last)
        store_logits(fragment, m, tile);
      else
        keep(fragment, own);
      return true;
    });
  }

  // Stores the chunk. The last warp with this part of the tile adds all chunks.
  __device__ __forceinline__ void store_chunk(sm80::Accumulators<Shape>& D,
                                              const Tile& tile) const {
    constexpr int kWarps = Shape::kThreads / kWarp;
    const Arrivals arrivals(params_.counters + int64_t{tile.m_block} * kWarps + threadIdx.x / kWarp,
                            params_.stamp);
    arrivals.open_by_warp();
    sm80::for_each_fragment<Shape>(D, [&](int m, const Fragment& fragment) {
      keep(fragment, vectors(tile.expert * params_.tiles + tile.m_block, m));
      return true;
    });
    if (!arrivals.is_last_warp(static_cast<Counter>(params_.chunks))) return;
#pragma unroll 1
    for (int m = 0; m < Shape::kFragments; ++m) {
      Fragment sum;
      read(vectors(tile.m_block, m), sum);
#pragma unroll 1
      for (int32_t chunk = 1; chunk < params_.chunks; ++chunk) {
        Fragment next;
        read(vectors(chunk * params_.tiles + tile.m_block, m), next);
        add(sum, next);
#pragma unroll
        for (int i = 0; i < Shape::kWarpColumns / 2; ++i) sum[0][i] = next[0][i];
      }
      store_logits(sum, m, tile);
    }
  }

  __device__ __forceinline__ void store_logits(const Fragment& sum, int m, const Tile& tile) const {
    switch (params_.dtype) {
      case TILEMOE_BFLOAT16: return store_as<__nv_bfloat16>(sum, m, tile);
      case TILEMOE_FLOAT16: return store_as<__half>(sum, m, tile);
      default: return store_as<float>(sum, m, tile);
    }
  }
  template <class Logit>
  __device__ __forceinline__ void store_as(const Fragment& sum, int m, const Tile& tile) const {
    const int32_t first = tile.n_block * Shape::BLOCK_N + Shape::fragment_column();
    const int32_t row = tile.row_begin + Shape::fragment_row(m) + fragment::row(0);
    auto* const logits = static_cast<Logit*>(params_.logits) + row * params_.row_stride;
    const bool biased = params_.bias.data != nullptr;
#pragma unroll
    for (int j = 0; j < Shape::kWarpColumns / 8; ++j) {
      const int32_t column = first + fragment::column(j);
      if (column >= params_.E) break;
      const bool both = column + 1 < params_.E;
      const float low = biased ? params_.bias.at(column) : 0.f;
      const float high = biased && both ? params_.bias.at(column + 1) : 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const d = &sum[0][4 * j + 2 * half];
        if (row + 8 * half < params_.T)
          put(logits + 8 * half * params_.row_stride + column, biased ? d[0] + low : d[0],
              biased ? d[1] + high : d[1], both);
      }
    }
  }
  template <class Logit>
  __device__ __forceinline__ void put(Logit* place, float low, float high, bool both) const {
    if constexpr (sizeof(Logit) == sizeof(float)) {
      if (params_.by_two) {
        *reinterpret_cast<float2*>(place) = {low, high};
      } else {
        place[0] = low;
        if (both) place[1] = high;
      }
    } else {
      const uint32_t word = pack(low, high, Logit());
      if (params_.by_two) {
        *reinterpret_cast<uint32_t*>(place) = word;
      } else {
        auto* const halves = reinterpret_cast<uint16_t*>(place);
        halves[0] = static_cast<uint16_t>(word);
        if (both) halves[1] = static_cast<uint16_t>(word >> 16);
      }
    }
  }

  const Params& params_;
};

}  // namespace tilemoe::cuda::logits
