// Operand B: BLOCK_N columns of the product, which are rows of one expert's weights, in either
// major. Rows past the weights' last and steps past the sum's are zeros.
//
// Of a gated activation each warp's columns are two parts, gate rows and then as many up rows: so
// gate and up of a column meet in one thread's accumulators, whether they lie one after the other,
// interleaved or in two tensors.
#pragma once

#include <cstdint>

#include "check.h"
#include "cuda/core/operand.h"
#include "cuda/core/part_of_sum.h"
#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/sm80/stage_rows.h"

namespace tilemoe::cuda::sm80 {

// Every expert's weights (E, rows, sum), of which one of the last two is contiguous.
struct ExpertWeights {
  const char* data;
  int64_t expert_bytes, line_bytes;  // the latter of the dimension that is not contiguous
  uint32_t line_bytes_32;            // the same: an address is one multiplication
  int32_t rows, sum;

  template <Major kMajor>
  static ExpertWeights of(const tilemoe_tensor& W) {
    const auto element = static_cast<int64_t>(tilemoe_dtype_size(W.dtype));
    const int64_t line_bytes = W.stride[kMajor == Major::kK ? 1 : 2] * element;
    TILEMOE_CHECK_SUPPORTED(line_bytes <= UINT32_MAX,
                            "rows of weights are " << line_bytes << " bytes apart");
    return {.data = static_cast<const char*>(W.data),
            .expert_bytes = W.stride[0] * element,
            .line_bytes = line_bytes,
            .line_bytes_32 = static_cast<uint32_t>(line_bytes),
            .rows = static_cast<int32_t>(W.shape[1]),
            .sum = static_cast<int32_t>(W.shape[2])};
  }
};

// Copies a stage of a tile's rows. kParts: of a warp's columns, gate and up.
template <class Shape, Major kMajor, int kParts>
class WeightStage {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;
  using Stage = StageRows<Shape::kThreads, kMajor == Major::kK ? Shape::BLOCK_N : Shape::BLOCK_K>;
  static constexpr int kElementBytes = sizeof(typename Shape::Element);
  static constexpr int kPieceElements = Stage::kPieceBytes / kElementBytes;
  static constexpr int kPartColumns = Shape::kWarpColumns / kParts;
  static constexpr int kPiecesAPart = Stage::kPieces / kParts;
  // K-major: a pass is of one part, or of whole warps' columns, of which a thread has one part.
  static constexpr bool kPassOfOnePart = kParts == 1 || kPartColumns % Stage::kAtOnce == 0;
  static constexpr bool kThreadHasOnePart = kMajor == Major::kMN || !kPassOfOnePart;
  static_assert(kPassOfOnePart || kMajor == Major::kMN ||
                Stage::kAtOnce % Shape::kWarpColumns == 0);

  __device__ explicit WeightStage(int32_t thread) : stage_(thread) {}

  __device__ void begin(const Tile& tile) { first_row_ = tile.n_block * (Shape::BLOCK_N / kParts); }

  // What this thread copies first of an expert's weights. Parts are as wide as each other.
  __device__ const char* first(const ExpertWeights& W, int32_t expert) const {
    const int64_t line = kMajor == Major::kK ? row() : stage_.row();
    const int64_t in_line = kMajor == Major::kK ? stage_.piece() * kPieceElements : row();
    return W.data + expert * W.expert_bytes + line * W.line_bytes + in_line * kElementBytes;
  }
  // The part that a thread copies of, where it is one.
  __device__ int part() const {
    return kMajor == Major::kMN ? stage_.piece() / kPiecesAPart
           : kPassOfOnePart     ? 0
                                : stage_.row() / kPartColumns % kParts;
  }

  // The block of the sum that begins at `sum`. weights(part) and from(part), as first() gives it, are
  // a part's; MN-major, of the thread's part alone.
  template <class OfPart, class FromPart>
  __device__ __forceinline__ void copy(uint32_t shared, int32_t sum, const OfPart& weights,
                                       const FromPart& from) const {
    if constexpr (kMajor == Major::kK)
      copy_k_major(shared, sum, weights, from);
    else
      copy_mn_major(shared, sum, weights(part()), from(part()));
  }

 private:
  __device__ int32_t row() const {
    if constexpr (kMajor == Major::kMN)
      return first_row_ + stage_.piece() % kPiecesAPart * kPieceElements;
    else if constexpr (kPassOfOnePart)
      return first_row_ + stage_.row();
    else
      return first_row_ + stage_.row() / Shape::kWarpColumns * kPartColumns +
             stage_.row() % kPartColumns;
  }
  __device__ bool whole(const ExpertWeights& W, int32_t sum) const {
    return sum + Shape::BLOCK_K <= W.sum && first_row_ + Shape::BLOCK_N / kParts <= W.rows;
  }

  // Rows of 128 bytes of the sum.
  template <class OfPart, class FromPart>
  __device__ __forceinline__ void copy_k_major(uint32_t shared, int32_t sum, const OfPart& weights,
                                               const FromPart& from) const {
    const int32_t step = sum + stage_.piece() * kPieceElements;
    const char* first[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      first[p] = from(kThreadHasOnePart ? part() : p) + int64_t{sum} * kElementBytes;
    const auto copy_rows = [&](const auto& exists) {
#pragma unroll
      for (int i = 0; i < Stage::kPasses; ++i) {
        const int in_tile = i * Stage::kAtOnce;
        const int part = kParts == 1 ? 0 : in_tile / kPartColumns % kParts;
        const int further =
            kParts == 1 ? in_tile
                        : in_tile / Shape::kWarpColumns * kPartColumns + in_tile % kPartColumns;
        const ExpertWeights& W = weights(kThreadHasOnePart ? this->part() : part);
        stage_.copy(
            shared, i,
            first[part] + static_cast<uint64_t>(W.line_bytes_32) * static_cast<uint32_t>(further),
            exists(W, row() + further));
      }
    };
    if (whole(weights(0), sum))
      copy_rows([](const ExpertWeights&, int32_t) { return true; });
    else
      copy_rows([&](const ExpertWeights& W, int32_t r) { return r < W.rows && step < W.sum; });
  }

  // Chunks of 64 rows: steps of the sum, of 128 bytes each.
  __device__ __forceinline__ void copy_mn_major(uint32_t shared, int32_t sum,
                                                const ExpertWeights& W, const char* from) const {
    const int32_t step = sum + stage_.row();
    const char* const first = from + sum * W.line_bytes;
    const auto copy_steps = [&](const auto& exists) {
#pragma unroll
      for (int i = 0; i < Stage::kPasses; ++i)
#pragma unroll
        for (int chunk = 0; chunk < Shape::BLOCK_N / 64; ++chunk)
          stage_.copy(shared + chunk * Operand::kChunkBytes, i,
                      first +
                          static_cast<uint64_t>(W.line_bytes_32) *
                              (static_cast<uint32_t>(i) * Stage::kAtOnce) +
                          chunk * kPartColumns * kElementBytes,
                      exists(i, chunk));
    };
    if (whole(W, sum))
      copy_steps([](int, int) { return true; });
    else
      copy_steps([&](int i, int chunk) {
        return step + i * Stage::kAtOnce < W.sum && row() + chunk * kPartColumns < W.rows;
      });
  }

  Stage stage_;
  int32_t first_row_;
};

template <class Shape, Major kMajor, int kParts>
class Weights {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;

  struct Params {
    ExpertWeights part[kParts];
  };

  // Of kParts weights (E, columns of the product, sum).
  static Params params(const tilemoe_tensor* weights) {
    Params params{};
    for (int p = 0; p < kParts; ++p) params.part[p] = ExpertWeights::of<kMajor>(weights[p]);
    return params;
  }

  __device__ Weights(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    stage_.begin(tile);
#pragma unroll
    for (int p = 0; p < kPointers; ++p)
      first_[p] = stage_.first(params_.part[kPointers == 1 ? stage_.part() : p], tile.expert);
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t k_block) const {
    stage_.copy(
        shared, k_block * Shape::BLOCK_K,
        [&](int part) -> const ExpertWeights& { return params_.part[part]; },
        [&](int part) { return first_[kPointers == 1 ? 0 : part]; });
  }

 private:
  static constexpr int kPointers =
      WeightStage<Shape, kMajor, kParts>::kThreadHasOnePart ? 1 : kParts;

  const Params& params_;
  WeightStage<Shape, kMajor, kParts> stage_;
  const char* first_[kPointers];
};

// Where the sum runs over the gate part and then the up part: W1's, which lie one after the other,
// interleaved or in two tensors.
template <class Shape, Major kMajor>
class SummedWeights {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;

  struct Params {
    ExpertWeights part[2];
    int32_t blocks_a_part;
  };

  // Of W1's parts (E, columns, d), which are summed over; the product has d columns.
  static Params params(const UpParts& W1) {
    Params params{};
    params.blocks_a_part = k_blocks_of_a_part<Shape>(W1.columns);
    for (int p = 0; p < W1.count; ++p)
      params.part[p] = ExpertWeights::of<kMajor>(transposed(W1.part[p]));
    return params;
  }

  __device__ SummedWeights(const Params& params, int32_t thread)
      : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    stage_.begin(tile);
    expert_ = tile.expert;
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t k_block) const {
    const auto sum = PartOfSum::of<Shape::BLOCK_K>(k_block, params_.blocks_a_part);
    const ExpertWeights& W = params_.part[sum.part];
    stage_.copy(
        shared, sum.begin, [&](int) -> const ExpertWeights& { return W; },
        [&](int) { return stage_.first(W, expert_); });
  }

 private:
  const Params& params_;
  WeightStage<Shape, kMajor, 1> stage_;
  int32_t expert_;
};

}  // namespace tilemoe::cuda::sm80
