// The activation gradient's end, of a slab: from D = dA' and the stored H, A = act(H) again, dH =
// act'(H) (s dA'), A' = s A and the row sums <dA', A> of each 64 columns.
//
// Threads read H from memory as they need it, since registers for more would be spilled, and store
// dH and A' from registers. While one warp waits, others of its scheduler work. dH may lie over H:
// a warp has read what it stores over, and rows past the expert's last are neither read nor
// stored.
#pragma once

#include <cstdint>

#include "backend.h"
#include "cuda/core/slab.h"
#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/epilogue/activation_gradient.h"
#include "cuda/epilogue/store.h"
#include "cuda/epilogue/words_of_h.h"

namespace tilemoe::cuda {

template <class Shape, Activations kActivations>
class SlabActivationGradient {
 public:
  using Element = typename Shape::Out;  // of H, dH and A'
  using H = WordsOfH<Shape, kActivations>;
  using Rows = StoreByThreads<Shape, H::kColumns>;

  static constexpr int kGroup = kDsColumns;

  using HParams = typename H::Params;

  struct Params {
    HParams H;
    typename Rows::Output A_scaled;  // (capacity, 1, n); may be not wanted
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

  __device__ explicit SlabActivationGradient(const Params& params) : params_(params) {}

  // Slab m of the warp, of a group of ds's columns that begins at `column`; `h` is the tile's. False:
  // neither it nor a later one has rows.
  template <class Function>
  __device__ __forceinline__ bool finish(const Function& f, const H& h, int m, const Tile& tile,
                                         int32_t column, const float (&dA)[1][kGroup / 2]) const {
    const int32_t row = tile.row_begin + Shape::slab_row(m);
    if (row >= tile.row_end) return false;
    float s[2], ds[2] = {0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = row + slab::row(half);
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
  // H::kColumns columns of a slab.
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
    const int32_t r = row + slab::row(slab::lane() % 2);
    if (slab::lane() % 4 < 2 && r < row_end && params_.ds_partial != nullptr)
      params_.ds_partial[group * params_.capacity + r] = sum;
  }

  const Params& params_;
};

}  // namespace tilemoe::cuda
