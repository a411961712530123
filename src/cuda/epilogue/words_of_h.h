// H and dH of the activation gradient, 32 columns of A of a slab at a time: gate and up words as a
// slab has them, whether gate and up lie in two parts or in adjacent columns.
#pragma once

#include <cstdint>

#include "backend.h"
#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/core/variant.h"
#include "cuda/epilogue/load_threads.h"
#include "cuda/epilogue/store_threads.h"
#include "cuda/ptx/vector_copy.h"

namespace tilemoe::cuda {

template <class Shape, Activations kActivations>
class WordsOfH {
 public:
  using Element = typename Shape::Out;
  static constexpr int kColumns = 32;  // of A
  static constexpr int kParts = kActivations == Activations::kPlain ? 1 : 2;
  static constexpr bool kMayBeAdjacent = kActivations == Activations::kGated;
  using Rows = StoreByThreads<Shape, kColumns>;

  struct Params {
    const Element* H;
    int64_t row_stride;        // of H, in elements
    typename Rows::Output dH;  // (capacity, kParts, n), or (capacity, 1, 2n); may be not wanted
    int32_t n;
    bool adjacent;  // gate and up of a column of A lie side by side; needs kMayBeAdjacent
  };

  static Params params(const ActivationGradient& step) {
    const tilemoe_experts& experts = *step.experts;
    const bool adjacent = has_adjacent_columns(experts, step.W1);
    const int64_t parts = adjacent ? 1 : kParts, columns = kParts * experts.n / parts;
    return {.H = static_cast<const Element*>(step.H.data),
            .row_stride = step.H.stride[0],
            .dH = Rows::output(step.dH, parts, columns),
            .n = static_cast<int32_t>(experts.n),
            .adjacent = adjacent};
  }

  // words[j][half] has numbers 4 j + 2 half and the next.
  using Words = uint32_t[kColumns / 8][2];

  // As it comes from memory: gate and up; or where these are adjacent, 8 bytes of either row of each
  // 8 columns of A, the upper rows' in the first.
  struct Loaded {
    LoadedColumns part[kParts];
  };

  __device__ WordsOfH(const Params& params, const Tile& tile) : params_(params), tile_(tile) {}

  // Of slab m, from `column` of A on. What is not there is zeros.
  __device__ __forceinline__ Loaded load(int m, int32_t column) const {
    Loaded loaded{};
    const int32_t row = tile_.row_begin + Shape::slab_row(m);
    const bool exists[2] = {row + slab::row(0) < tile_.row_end, row + slab::row(1) < tile_.row_end};
    const Element* const first = params_.H + row * params_.row_stride;
    if (adjacent()) {
      load_adjacent(first + 2 * column, exists, params_.n - column, loaded);
    } else {
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        loaded.part[p] = load_columns(first + int64_t{p} * params_.n + column, params_.row_stride,
                                      exists, params_.n - column);
    }
    return loaded;
  }

  // All lanes of a warp call it.
  __device__ __forceinline__ void words(const Loaded& loaded, Words& gate, Words& up) const {
    if (adjacent()) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 both = adjacent_words(loaded, j, half);
          gate[j][half] = __byte_perm(both.x, both.y, kLowHalves);
          up[j][half] = __byte_perm(both.x, both.y, kHighHalves);
        }
    } else {
      words_of_columns(loaded.part[0], gate);
      if constexpr (kParts == 2) words_of_columns(loaded.part[1], up);
    }
  }

  // dH's, in H's place of the slab.
  __device__ __forceinline__ void store(int m, int32_t column, const Words& gate,
                                        const Words& up) const {
    const Rows rows(0, 0);
    if (adjacent()) {
      store_adjacent(m, column, gate, up);
    } else {
      rows.store_packed(params_.dH, m, tile_.row_begin, tile_.row_end, 0, column, gate);
      if constexpr (kParts == 2)
        rows.store_packed(params_.dH, m, tile_.row_begin, tile_.row_end, 1, column, up);
    }
  }

 private:
  static constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;  // of two words

  __device__ bool adjacent() const {
    return kMayBeAdjacent && params_.adjacent;
  }

  __device__ __forceinline__ void load_adjacent(const Element* slab_row, const bool (&exists)[2],
                                                int32_t columns_left, Loaded& loaded) const {
    if constexpr (kMayBeAdjacent) {
      const Element* const first =
          slab_row + slab::row(0) * params_.row_stride + 2 * slab::column();
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (exists[half] && 8 * j < columns_left) {
            const uint2 both =
                ptx::load_global_8(first + half * (slab::kRows / 2) * params_.row_stride + 16 * j);
            uint4& vector = loaded.part[half].row[j / 2];
            if (j % 2 == 0)
              vector.x = both.x, vector.y = both.y;
            else
              vector.z = both.x, vector.w = both.y;
          }
    }
  }
  __device__ static uint2 adjacent_words(const Loaded& loaded, int j, int half) {
    const uint4& vector = loaded.part[half % kParts].row[j / 2];
    return j % 2 == 0 ? uint2{vector.x, vector.y} : uint2{vector.z, vector.w};
  }
  __device__ __forceinline__ void store_adjacent(int m, int32_t column, const Words& gate,
                                                 const Words& up) const {
    if (params_.dH.columns == 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = tile_.row_begin + Shape::slab_row(m) + slab::row(half);
      if (row >= tile_.row_end) continue;
      Element* const first =
          params_.dH.data + row * params_.dH.row_stride + 2 * (column + slab::column());
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        if (column + 8 * j < params_.n)
          *reinterpret_cast<uint2*>(first + 16 * j) = {
              __byte_perm(gate[j][half], up[j][half], kLowHalves),
              __byte_perm(gate[j][half], up[j][half], kHighHalves)};
    }
  }

  const Params& params_;
  const Tile& tile_;
};

}  // namespace tilemoe::cuda
