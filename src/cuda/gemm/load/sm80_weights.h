// Operand B of sm80, by cp.async: BLOCK_N columns of the GEMM, which are rows of one expert's
// weights, in either major. Rows past the weights' last and steps past the end of K are zeros.
//
// With a gated activation each warp's columns are two parts, gate rows and then as many up rows: so
// one thread's accumulators have gate and up of a column, whether these lie one after the other,
// interleaved or in two tensors.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/load/sm80_rows.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda::sm80 {

// The weights of all experts (E, rows, K); one of the last two dimensions is contiguous.
struct ExpertWeights {
  const char* data;
  int64_t expert_bytes;
  uint32_t line_bytes;  // of the dimension that is not contiguous: an address is one multiplication
  int32_t rows, sum;

  template <Major kMajor>
  static ExpertWeights of(const tilemoe_tensor& W) {
    const auto element = static_cast<int64_t>(tilemoe_dtype_size(W.dtype));
    const int64_t line_bytes = W.stride[kMajor == Major::kK ? 1 : 2] * element;
    TILEMOE_ASSERT(line_bytes <= UINT32_MAX,  // cuda_backend.cpp
                   "rows of weights are " << line_bytes << " bytes apart");
    return {.data = static_cast<const char*>(W.data),
            .expert_bytes = W.stride[0] * element,
            .line_bytes = static_cast<uint32_t>(line_bytes),
            .rows = static_cast<int32_t>(W.shape[1]),
            .sum = static_cast<int32_t>(W.shape[2])};
  }
};

// Copies a stage of a tile's rows. A warp's columns have kParts parts: two for gate and up.
template <class Shape, Major kMajor, int kParts>
class WeightStage {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;
  using Stage = StageRows<Shape::kThreads, kMajor == Major::kK ? Shape::BLOCK_N : Shape::BLOCK_K>;
  static constexpr int kElementBytes = sizeof(typename Shape::Element);
  static constexpr int kPieceElements = Stage::kPieceBytes / kElementBytes;
  static constexpr int kPartColumns = Shape::kWarpColumns / kParts;
  static constexpr int kPiecesAPart = Stage::kPieces / kParts;
  // K-major: a pass has rows of one part, or the columns of whole warps; a thread then has one
  // part.
  static constexpr bool kPassOfOnePart = kParts == 1 || kPartColumns % Stage::kAtOnce == 0;
  static constexpr bool kThreadHasOnePart = kMajor == Major::kMN || !kPassOfOnePart;
  static_assert(kPassOfOnePart || kMajor == Major::kMN ||
                Stage::kAtOnce % Shape::kWarpColumns == 0);

  __device__ explicit WeightStage(int32_t thread) : stage_(thread) {}

  // The first address that this thread copies from, of an expert's weights.
  __device__ const char* first(const ExpertWeights& W, int32_t expert, int32_t n_block) const {
    const auto line = static_cast<uint32_t>(kMajor == Major::kK ? row(n_block) : sum());
    const auto in_line = static_cast<uint32_t>(kMajor == Major::kK ? sum() : row(n_block));
    return W.data + expert * W.expert_bytes + uint64_t{line} * W.line_bytes +
           uint64_t{in_line} * kElementBytes;
  }
  // Its row of the part and its step of K.
  __device__ int32_t row(int32_t n_block) const {
    return n_block * (Shape::BLOCK_N / kParts) + row_in_tile();
  }
  __device__ int32_t sum() const {
    return kMajor == Major::kK ? stage_.piece() * kPieceElements : stage_.row();
  }
  // The part that this thread copies, if kThreadHasOnePart.
  __device__ int part() const {
    return kMajor == Major::kMN ? stage_.piece() / kPiecesAPart
           : kPassOfOnePart     ? 0
                                : stage_.row() / kPartColumns % kParts;
  }

  // Copies a k block. from(part) is this thread's first address, as first() returns it; `rows` rows
  // and `sum` steps of K are left from there on. Lines are line_bytes(part) apart.
  template <class FromPart, class OfPart>
  __device__ __forceinline__ void copy(uint32_t shared, const FromPart& from,
                                       const OfPart& line_bytes, int32_t rows, int32_t sum) const {
    if constexpr (kMajor == Major::kK)
      copy_k_major(shared, from, line_bytes, rows, sum);
    else
      copy_mn_major(shared, from(0), line_bytes(0), rows, sum);
  }
  // Bytes from one k block to the next.
  __device__ static uint64_t block_bytes(uint32_t line_bytes) {
    return kMajor == Major::kK ? Stage::kRowBytes : uint64_t{line_bytes} * Shape::BLOCK_K;
  }

 private:
  __device__ int32_t row_in_tile() const {
    if constexpr (kMajor == Major::kMN)
      return stage_.piece() % kPiecesAPart * kPieceElements;
    else if constexpr (kPassOfOnePart)
      return stage_.row();
    else
      return stage_.row() / Shape::kWarpColumns * kPartColumns + stage_.row() % kPartColumns;
  }

  // Rows of 128 bytes along K.
  template <class FromPart, class OfPart>
  __device__ __forceinline__ void copy_k_major(uint32_t shared, const FromPart& from,
                                               const OfPart& line_bytes, int32_t rows,
                                               int32_t sum) const {
    const bool in_sum = sum > 0;
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i) {
      const int in_tile = i * Stage::kAtOnce;
      const int part = kParts == 1 ? 0 : in_tile / kPartColumns % kParts;
      const int further =
          kParts == 1 ? in_tile
                      : in_tile / Shape::kWarpColumns * kPartColumns + in_tile % kPartColumns;
      stage_.copy(shared, i,
                  from(part) + uint64_t{line_bytes(part)} * static_cast<uint32_t>(further),
                  in_sum && rows > further);
    }
  }

  // Chunks of 64 rows: each step of K has 128 bytes of them.
  __device__ __forceinline__ void copy_mn_major(uint32_t shared, const char* from,
                                                uint32_t line_bytes, int32_t rows,
                                                int32_t sum) const {
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i) {
      const bool in_sum = sum > i * Stage::kAtOnce;
#pragma unroll
      for (int chunk = 0; chunk < Shape::BLOCK_N / 64; ++chunk)
        stage_.copy(shared + chunk * Operand::kChunkBytes, i,
                    from + uint64_t{line_bytes} * (static_cast<uint32_t>(i) * Stage::kAtOnce) +
                        chunk * kPartColumns * kElementBytes,
                    in_sum && rows > chunk * kPartColumns);
    }
  }

  Stage stage_;
};

template <class Shape, Major kMajor, int kParts>
class Weights {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;

  struct Params {
    ExpertWeights part[kParts];
    int32_t padding;  // steps from the end of K to the end of its last k block
  };

  // Of kParts weights (E, columns of the GEMM, K) of one shape.
  static Params params(const tilemoe_tensor* weights) {
    Params params{};
    for (int p = 0; p < kParts; ++p) params.part[p] = ExpertWeights::of<kMajor>(weights[p]);
    params.padding = (Shape::BLOCK_K - params.part[0].sum % Shape::BLOCK_K) % Shape::BLOCK_K;
    return params;
  }

  __device__ Weights(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
#pragma unroll
    for (int p = 0; p < kPointers; ++p)
      from_[p] = stage_.first(weights(p), tile.expert, tile.n_block);
    rows_left_ = params_.part[0].rows - stage_.row(tile.n_block);
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t blocks_left) const {
    stage_.copy(
        shared, [&](int part) { return from_[kPointers == 1 ? 0 : part]; },
        [&](int part) { return weights(part).line_bytes; }, rows_left_,
        blocks_left * Shape::BLOCK_K - params_.padding - stage_.sum());
  }
  __device__ __forceinline__ void advance(int32_t /*blocks_left*/) {
#pragma unroll
    for (int p = 0; p < kPointers; ++p) from_[p] += stage_.block_bytes(weights(p).line_bytes);
  }

 private:
  static constexpr int kPointers =
      WeightStage<Shape, kMajor, kParts>::kThreadHasOnePart ? 1 : kParts;

  // The weights of a part, or of the only part that the thread has.
  __device__ const ExpertWeights& weights(int part) const {
    return params_.part[kPointers == 1 ? stage_.part() : part];
  }

  const Params& params_;
  WeightStage<Shape, kMajor, kParts> stage_;
  const char* from_[kPointers];  // this thread's first address of the next k block
  int32_t rows_left_;
};

// Weights whose K is the gate part and then the up part: W1's, which lie one after the other,
// interleaved or in two tensors.
template <class Shape, Major kMajor>
class WeightsByParts {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;

  struct Params {
    ExpertWeights part[2];
    int32_t blocks_a_part;
    int32_t padding;  // steps from the end of a part to the end of its last k block
  };

  // Of W1's parts (E, columns, d): K runs over the columns, and the GEMM has d columns.
  static Params params(const UpParts& W1) {
    Params params{};
    params.blocks_a_part = k_blocks_of_a_part<Shape>(W1.columns);
    params.padding =
        static_cast<int32_t>(int64_t{params.blocks_a_part} * Shape::BLOCK_K - W1.columns);
    for (int p = 0; p < W1.count; ++p)
      params.part[p] = ExpertWeights::of<kMajor>(transposed(W1.part[p]));
    return params;
  }

  __device__ WeightsByParts(const Params& params, int32_t thread)
      : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    from_ = stage_.first(params_.part[0], tile.expert, tile.n_block);
    of_next_part_ = stage_.first(params_.part[1], tile.expert, tile.n_block);
    line_bytes_ = params_.part[0].line_bytes;
    rows_left_ = params_.part[0].rows - stage_.row(tile.n_block);
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t blocks_left) const {
    const int32_t of_part = blocks_left_of_part(blocks_left, params_.blocks_a_part);
    stage_.copy(
        shared, [&](int) { return from_; }, [&](int) { return line_bytes_; }, rows_left_,
        of_part * Shape::BLOCK_K - params_.padding - stage_.sum());
  }
  __device__ __forceinline__ void advance(int32_t blocks_left) {
    const bool next_part = blocks_left == params_.blocks_a_part + 1;
    from_ = next_part ? of_next_part_ : from_ + stage_.block_bytes(line_bytes_);
    line_bytes_ = next_part ? params_.part[1].line_bytes : line_bytes_;
  }

 private:
  const Params& params_;
  WeightStage<Shape, kMajor, 1> stage_;
  const char* from_;  // this thread's first address of the next k block
  const char* of_next_part_;
  uint32_t line_bytes_;
  int32_t rows_left_;
};

}  // namespace tilemoe::cuda::sm80
