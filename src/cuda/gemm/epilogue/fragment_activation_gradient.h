// The activation gradient's epilogue for one fragment (sm80, sm100). It reads H from global memory
// by threads, the reverse of epilogue/store_threads.h.
#pragma once

#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/variant.h"
#include "cuda/gemm/epilogue/activation_gradient.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda {

// 32 columns of a fragment's upper and lower 8 rows in the layout of the loads: a lane has 8
// columns of one row of either. Columns and rows that do not exist are zeros.
struct LoadedColumns {
  uint4 row[2];
};

template <class Element>
__device__ __forceinline__ LoadedColumns load_columns(const Element* fragment_row,
                                                      int64_t row_stride,
                                                      const bool (&row_exists)[2],
                                                      int32_t columns_left) {
  constexpr int kGroup = 8;
  const int32_t lane = fragment::lane(), column = lane % 4 * kGroup;
  const Element* const first = fragment_row + lane / 4 * row_stride + column;
  LoadedColumns loaded{};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (row_exists[half] && column < columns_left)
      loaded.row[half] = ptx::load_global_16(first + half * (fragment::kRows / 2) * row_stride);
  return loaded;
}

// The same in the layout of a fragment: words[j][half] has numbers 4 j + 2 half and the next. All
// lanes of a warp call it.
__device__ __forceinline__ void words_of_columns(const LoadedColumns& loaded,
                                                 uint32_t (&words)[4][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& row = loaded.row[half];
    const uint4 word = words_of_group({row.x, row.y, row.z, row.w}, fragment::lane());
    words[0][half] = word.x, words[1][half] = word.y, words[2][half] = word.z,
    words[3][half] = word.w;
  }
}

// H and dH of the activation gradient, 32 columns of A at a time: words of gate and up in the
// layout of a fragment, whether gate and up are two parts or interleaved columns.
template <class Shape, Activations kActivations>
class WordsOfH {
 public:
  using Element = typename Shape::Recipe::Out::H;
  static constexpr int kColumns = 32;  // of A
  static constexpr int kParts = kActivations == Activations::kPlain ? 1 : 2;
  static constexpr bool kMayInterleaveColumns = kActivations == Activations::kGated;
  using Rows = StoreByThreads<Shape, Element, kColumns>;

  struct Params {
    const Element* H;
    int64_t row_stride;        // of H, in elements
    typename Rows::Output dH;  // (capacity, kParts, n), or (capacity, 1, 2n); may be absent
    int32_t n;
    bool interleaved_columns;  // interleaved gate/up columns; needs kMayInterleaveColumns
  };

  static Params params(const ActivationGradient& step) {
    const tilemoe_experts& experts = *step.experts;
    const bool interleaved_columns = has_interleaved_columns(experts, step.W1);
    const int64_t parts = interleaved_columns ? 1 : kParts, columns = kParts * experts.n / parts;
    return {.H = static_cast<const Element*>(step.H.data),
            .row_stride = step.H.stride[0],
            .dH = Rows::output(step.dH, parts, columns),
            .n = static_cast<int32_t>(experts.n),
            .interleaved_columns = interleaved_columns};
  }

  // words[j][half] has numbers 4 j + 2 half and the next.
  using Words = uint32_t[kColumns / 8][2];

  // In the layout of the loads: gate and up; or of interleaved columns, 8 bytes of each row for
  // every 8 columns of A, with the upper rows in the first.
  struct Loaded {
    LoadedColumns part[kParts];
  };

  __device__ WordsOfH(const Params& params, const Tile& tile) : params_(params), tile_(tile) {}

  // Loads fragment m from `column` of A on; columns and rows that do not exist are zeros.
  __device__ __forceinline__ Loaded load(int m, int32_t column) const {
    Loaded loaded{};
    const int32_t row = tile_.row_begin + Shape::fragment_row(m);
    const bool exists[2] = {row + fragment::row(0) < tile_.row_end,
                            row + fragment::row(1) < tile_.row_end};
    const Element* const first = params_.H + row * params_.row_stride;
    if (interleaved_columns()) {
      load_interleaved(first + 2 * column, exists, params_.n - column, loaded);
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
    if (interleaved_columns()) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 both = interleaved_words(loaded, j, half);
          gate[j][half] = __byte_perm(both.x, both.y, kLowHalves);
          up[j][half] = __byte_perm(both.x, both.y, kHighHalves);
        }
    } else {
      words_of_columns(loaded.part[0], gate);
      if constexpr (kParts == 2) words_of_columns(loaded.part[1], up);
    }
  }

  // Stores dH of the fragment that load() read.
  __device__ __forceinline__ void store(int m, int32_t column, const Words& gate,
                                        const Words& up) const {
    const Rows rows(0, 0);
    if (interleaved_columns()) {
      store_interleaved(m, column, gate, up);
    } else {
      rows.store_packed(params_.dH, m, tile_.row_begin, tile_.row_end, 0, column, gate);
      if constexpr (kParts == 2)
        rows.store_packed(params_.dH, m, tile_.row_begin, tile_.row_end, 1, column, up);
    }
  }

 private:
  static constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;  // of two words

  __device__ bool interleaved_columns() const {
    return kMayInterleaveColumns && params_.interleaved_columns;
  }

  __device__ __forceinline__ void load_interleaved(const Element* fragment_row,
                                                   const bool (&exists)[2], int32_t columns_left,
                                                   Loaded& loaded) const {
    if constexpr (kMayInterleaveColumns) {
      const Element* const first =
          fragment_row + fragment::row(0) * params_.row_stride + 2 * fragment::column();
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (exists[half] && 8 * j < columns_left) {
            const uint2 both = ptx::load_global_8(
                first + half * (fragment::kRows / 2) * params_.row_stride + 16 * j);
            uint4& vector = loaded.part[half].row[j / 2];
            if (j % 2 == 0)
              vector.x = both.x, vector.y = both.y;
            else
              vector.z = both.x, vector.w = both.y;
          }
    }
  }
  __device__ static uint2 interleaved_words(const Loaded& loaded, int j, int half) {
    const uint4& vector = loaded.part[half % kParts].row[j / 2];
    return j % 2 == 0 ? uint2{vector.x, vector.y} : uint2{vector.z, vector.w};
  }
  __device__ __forceinline__ void store_interleaved(int m, int32_t column, const Words& gate,
                                                    const Words& up) const {
    if (params_.dH.columns == 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = tile_.row_begin + Shape::fragment_row(m) + fragment::row(half);
      if (row >= tile_.row_end) continue;
      Element* const first =
          params_.dH.data + row * params_.dH.row_stride + 2 * (column + fragment::column());
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

// From D = dA' and the stored H: A = act(H) again, dH = act'(H) (s dA'), A' = s A and the row sums
// <dA', A> of each 64 columns.
//
// Threads read H when they need it, since reading ahead would spill registers, and store dH and A'
// from registers. While one warp waits, other warps of its scheduler work. dH may be the memory of
// H: a warp reads H before it overwrites it, and rows past the expert's last are neither read nor
// stored.
template <class Shape, Activations kActivations>
class FragmentActivationGradient {
 public:
  using Out = typename Shape::Recipe::Out;
  using Element = typename Out::dH;
  static_assert(all_same<Element, typename Out::H, typename Out::AScaled>);
  using H = WordsOfH<Shape, kActivations>;
  using Rows = StoreByThreads<Shape, Element, H::kColumns>;

  static constexpr int kGroup = kDsColumns;

  using HParams = typename H::Params;

  struct Params {
    HParams H;
    typename Rows::Output A_scaled;  // (capacity, 1, n); may be absent
    const float* score;              // (capacity); null: every s is 1
    float* ds_partial;               // (ds_groups(n), capacity); null: not wanted
    int64_t capacity;
    ActivationParams activation;
  };

  static Params params(const ActivationGradient& step) {
    const tilemoe_experts& experts = *step.experts;
    return {.H = H::params(step),
            .A_scaled = Rows::output(step.A_scaled, 1, experts.n),
            .score = step.rows.score,
            .ds_partial = step.ds_partial,
            .capacity = step.rows.capacity,
            .activation = activation_params(experts)};
  }

  __device__ explicit FragmentActivationGradient(const Params& params) : params_(params) {}

  // Finishes fragment m of the warp, for the group of columns of ds that begins at `column`; `h` is
  // the tile's. Returns false if neither this fragment nor a later one has rows.
  template <class Function>
  __device__ __forceinline__ bool finish(const Function& f, const H& h, int m, const Tile& tile,
                                         int32_t column, const float (&dA)[1][kGroup / 2]) const {
    const int32_t row = tile.row_begin + Shape::fragment_row(m);
    if (row >= tile.row_end) return false;
    float s[2], ds[2] = {0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = row + fragment::row(half);
      s[half] = params_.score != nullptr && r < tile.row_end ? params_.score[r] : 1.f;
    }
#pragma unroll
    for (int part = 0; part < kGroup / H::kColumns; ++part) {
      const int32_t first = column + part * H::kColumns;
      const typename H::Loaded loaded = h.load(m, first);
      differentiate(f, h, loaded, m, first, &dA[0][part * H::kColumns / 2], s, ds, tile);
    }
    store_sum(ds_of_row(ds), row, tile.row_end, column / kGroup);
    return true;
  }

 private:
  // H::kColumns columns of a fragment.
  template <class Function>
  __device__ __forceinline__ void differentiate(const Function& f, const H& h,
                                                const typename H::Loaded& loaded, int m,
                                                int32_t column, const float* dA,
                                                const float (&s)[2], float (&ds)[2],
                                                const Tile& tile) const {
    typename H::Words gate, up = {};
    h.words(loaded, gate, up);
    uint32_t A_scaled[H::kColumns / 8][2];
#pragma unroll
    for (int block = 0; block < H::kColumns / 16; ++block)
      differentiate_block<Element, kActivations>(
          f, packed_block(gate, block), packed_block(up, block), packed_block(A_scaled, block),
          &dA[8 * block], s, ds);
    h.store(m, column, gate, up);
    Rows(0, 0).store_packed(params_.A_scaled, m, tile.row_begin, tile.row_end, 0, column, A_scaled);
  }

  // 16 columns of words[j][half].
  __device__ static PackedBlock& packed_block(uint32_t (*words)[2], int block) {
    return reinterpret_cast<PackedBlock&>(words[2 * block]);
  }

  __device__ void store_sum(float sum, int32_t row, int32_t row_end, int32_t group) const {
    const int32_t r = row + fragment::row(fragment::lane() % 2);
    if (fragment::lane() % 4 < 2 && r < row_end && params_.ds_partial != nullptr)
      params_.ds_partial[group * params_.capacity + r] = sum;
  }

  const Params& params_;
};

}  // namespace tilemoe::cuda
