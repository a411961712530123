// Operand B of sm80 from the codes of quantised weights, by cp.async: BLOCK_N columns of the GEMM,
// which are rows of one expert's weights, K-major. A stage has the codes as they lie in memory: rows
// of 32 bytes, or of 64 with FP8. Codes past the last row and the end of K are zeros, the scales'
// reader (sm80_codes_mma.h) has finite scales there: every format but NF4 then has the value 0, and
// the rows of NF4 end with a k block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/formats.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda::sm80 {

// In a stage: row r of the tile at r * row_bytes. FP8: its 16 bytes of a step of K are exchanged
// with another step's, so that eight rows of one step lie in all banks.
template <int kRows_>
struct CodesOperand {
  static constexpr int kRows = kRows_;
  static constexpr int kPieceBytes = 16;
  static constexpr int kRowBytes4 = 32, kRowBytes8 = 64;  // 64 codes of 4 and of 8 bits
  static constexpr int kBytes = kRows * kRowBytes8;

  __device__ static uint32_t piece_of_fp8(uint32_t row, uint32_t step) {
    return (step ^ (row / 2 % 4)) * kPieceBytes;
  }
};

// The quantised weights of kParts parts of columns.
template <int kParts>
struct CodesParams {
  struct Part {
    const char* codes;
    const void* scales;
    const float* scale_map;
    const float* scale_of_scales;
    const float* scale_offset;
    int32_t first_row;  // of the weight's rows
  } part[kParts];
  float number[kCodes4];  // of the codes, of 4 bits
  tilemoe_format format;
  int32_t rows, row_step;        // of a part
  int32_t weight_rows, columns;  // of an expert: R and C
  int32_t padding;               // steps from the end of K to the end of its last k block
  int32_t scales_of_row;         // FP8: of 128 rows
  int32_t scale_rows;            // of an expert: R, or FP8's blocks of 128 rows
};

template <class Shape, int kParts>
class Codes {
 public:
  using Operand = CodesOperand<Shape::BLOCK_N>;
  using Params = CodesParams<kParts>;
  static constexpr int kPartColumns = Shape::kWarpColumns / kParts;
  static_assert(Shape::BLOCK_K == 64);

  static Params params(const WeightCodes& codes, const tilemoe_experts& experts,
                       const CodeRows& rows, int64_t columns) {
    const bool is_split = kParts == 2 && experts.gate_layout == TILEMOE_GATE_SPLIT;
    const tilemoe_format format = codes.weight.format;
    const bool is_fp8 = format == TILEMOE_FORMAT_FP8;
    const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
    Params params{};
    for (int p = 0; p < kParts; ++p) {
      const tilemoe_quantized& from = is_split && p == 1 ? codes.up : codes.weight;
      params.part[p] = {.codes = static_cast<const char*>(from.codes),
                        .scales = from.scales,
                        .scale_map = from.scale_map,
                        .scale_of_scales = from.scale_of_scales,
                        .scale_offset = from.scale_offset,
                        .first_row = narrow(rows.first[p])};
    }
    std::copy_n(numbers_of(format), kCodes4, params.number);
    params.format = format;
    params.rows = narrow(rows.count), params.row_step = narrow(rows.step);
    params.weight_rows = narrow(rows.R), params.columns = narrow(columns);
    params.padding = (Shape::BLOCK_K - params.columns % Shape::BLOCK_K) % Shape::BLOCK_K;
    params.scale_rows = is_fp8 ? narrow(blocks_of(rows.R, kFp8Tile)) : params.weight_rows;
    params.scales_of_row = narrow(blocks_of(columns, scale_columns(format)));
    return params;
  }

  __device__ Codes(const Params& params, int32_t thread) : params_(params), thread_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    const int32_t in_tile = row_in_tile();
    const int32_t row = tile.n_block * (Shape::BLOCK_N / kParts) +
                        in_tile / Shape::kWarpColumns * kPartColumns + in_tile % kPartColumns;
    rows_left_ = params_.rows - row;
    const auto& part = params_.part[in_tile / kPartColumns % kParts];
    const int64_t at = int64_t{tile.expert} * params_.weight_rows + part.first_row +
                       int64_t{row} * params_.row_step;
    from_ =
        part.codes + (at * params_.columns >> (is_fp8() ? 0 : 1)) + piece() * Operand::kPieceBytes;
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t blocks_left) const {
    const int32_t sum = blocks_left * Shape::BLOCK_K - params_.padding;
    if (is_fp8())
      copy_rows<4>(shared, sum);
    else
      copy_rows<2>(shared, sum);
  }
  __device__ __forceinline__ void advance(int32_t /*blocks_left*/) {
    from_ += is_fp8() ? Operand::kRowBytes8 : Operand::kRowBytes4;
  }

 private:
  // Columns of a row that share a scale.
  static int64_t scale_columns(tilemoe_format format) {
    switch (format) {
      case TILEMOE_FORMAT_FP8: return kFp8Tile;
      case TILEMOE_FORMAT_MXFP4: return kMxfp4Block;
      case TILEMOE_FORMAT_NVFP4: return kNvfp4Block;
      default: return kNf4Block;
    }
  }

  __device__ bool is_fp8() const { return params_.format == TILEMOE_FORMAT_FP8; }
  // A row has 4 pieces of 16 bytes with FP8, else 2.
  __device__ int32_t piece() const { return is_fp8() ? thread_ % 4 : thread_ % 2; }
  __device__ int32_t row_in_tile() const { return is_fp8() ? thread_ / 4 : thread_ / 2; }
  template <int kPieces>
  __device__ __forceinline__ void copy_rows(uint32_t shared, int32_t sum) const {
    constexpr int kAtOnce = Shape::kThreads / kPieces;
    constexpr int kRowBytes = kPieces * Operand::kPieceBytes;
    static_assert(kAtOnce % Shape::kWarpColumns == 0 && Shape::BLOCK_N % kAtOnce == 0,
                  "a thread has rows of one part");
    static_assert(kAtOnce % 8 == 0, "the exchanged pieces are the same in each pass");
    const bool in_sum = sum > piece() * (Shape::BLOCK_K / kPieces);
    const auto step_bytes =
        static_cast<uint32_t>(params_.row_step) * params_.columns / (kPieces == 4 ? 1 : 2);
    const uint32_t row = row_in_tile();
    const uint32_t at = kPieces == 4 ? Operand::piece_of_fp8(row, piece())
                                     : static_cast<uint32_t>(piece()) * Operand::kPieceBytes;
    const uint32_t to = shared + row * kRowBytes + at;
#pragma unroll
    for (int i = 0; i < Shape::BLOCK_N / kAtOnce; ++i) {
      const int further = i * kAtOnce / kParts;
      ptx::cp_async_16(to + i * kAtOnce * kRowBytes,
                       from_ + uint64_t{step_bytes} * static_cast<uint32_t>(further),
                       in_sum && rows_left_ > further ? 16 : 0);
    }
  }

  const Params& params_;
  int32_t thread_;
  int32_t rows_left_;  // of the part, from this thread's first one on
  const char* from_;   // this thread's first piece of the next k block
};

}  // namespace tilemoe::cuda::sm80
