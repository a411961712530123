// The MMAs of a stage whose operand B is codes of quantised weights (load/sm80_codes.h). A warp reads
// the codes of its B fragment from shared memory and makes values of them in registers, with the
// arithmetic of kernels/dequantize.cu: code times scale in float32, rounded once. The sum has the
// terms and the order of Mma, so that its bits are those of weights that were dequantised before.
//
// Scales are read from global memory, a k block ahead of their use: those of formats with bytes lie
// on no alignment that cp.async has.
#pragma once

#include <cstdint>

#include "core/formats.h"
#include "cuda/gemm/load/chained.h"
#include "cuda/gemm/load/sm80_codes.h"
#include "cuda/gemm/sm80_mma.h"
#include "cuda/ptx/convert.h"

namespace tilemoe::cuda::sm80 {

// The scales of a lane's rows of B: row lane / 4 of each eight columns of the warp. Of formats with
// several scales of a row in a k block, the four lanes of a row have one each.
template <class Shape, int kParts>
class CodeScales {
 public:
  static constexpr int kGroups = Shape::kWarpColumns / 8;
  static constexpr int kGroupsOfPart = kGroups / kParts;

  __device__ explicit CodeScales(const CodesParams<kParts>& params) : params_(params) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    expert_ = tile.expert;
    first_row_ = tile.n_block * (Shape::BLOCK_N / kParts) +
                 Shape::fragment_column() / Shape::kWarpColumns * (Shape::kWarpColumns / kParts) +
                 fragment::lane() / 4;
    block_ = 0;
    read();
    next_block();
  }
  // The scales that were read become those of the current k block; reads the next one's.
  __device__ __forceinline__ void next_block() {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) scale_[j] = number_of(j, raw_[j]);
    ++block_;
    read();
  }
  // That of group j at one step of K, which every lane of the row receives.
  __device__ float at(int j) const {
    return scale_[j];
  }
  __device__ float at(int j, int step) const {
    const int place = params_.format == TILEMOE_FORMAT_MXFP4 ? step / 2 : step;
    return __shfl_sync(kAllLanes, scale_[j], (fragment::lane() & ~3) + place);
  }

 private:
  __device__ const typename CodesParams<kParts>::Part& part(int j) const {
    return params_.part[j / kGroupsOfPart];
  }
  // Row of the weight; a row past the last one reads the last one's scales.
  __device__ __forceinline__ int32_t row(int j) const {
    const int32_t in_part = min(first_row_ + j % kGroupsOfPart * 8, params_.rows - 1);
    return part(j).first_row + in_part * params_.row_step;
  }
  // Scales of a row in a k block of 64.
  __device__ __forceinline__ int32_t scales_of_block() const {
    return params_.format == TILEMOE_FORMAT_NVFP4   ? 4
           : params_.format == TILEMOE_FORMAT_MXFP4 ? 2
                                                    : 1;
  }
  // The scale of the row that this lane has in k block `block`.
  __device__ __forceinline__ int64_t index(int j, int32_t block) const {
    const bool is_fp8 = params_.format == TILEMOE_FORMAT_FP8;
    const int32_t scale_row = is_fp8 ? row(j) / static_cast<int32_t>(kFp8Tile) : row(j);
    return (int64_t{expert_} * params_.scale_rows + scale_row) * params_.scales_of_row +
           column(block);
  }
  __device__ __forceinline__ int32_t column(int32_t block) const {
    if (params_.format == TILEMOE_FORMAT_FP8) return block / 2;
    const int32_t of_block = scales_of_block();
    return block * of_block + (of_block == 1 ? 0 : fragment::lane() % 4);
  }

  // Zero past the end of K, which is a finite scale.
  __device__ __forceinline__ void read() {
    const int32_t of_block = scales_of_block();
    const bool exists = column(block_) < params_.scales_of_row &&
                        (of_block == 1 || fragment::lane() % 4 < of_block);
    const bool is_float =
        params_.format == TILEMOE_FORMAT_FP8 || params_.format == TILEMOE_FORMAT_NF4;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      raw_[j] = 0;
      if (!exists) continue;
      if (is_float)
        raw_[j] = __ldg(static_cast<const uint32_t*>(part(j).scales) + index(j, block_));
      else
        raw_[j] = __ldg(static_cast<const uint8_t*>(part(j).scales) + index(j, block_));
    }
  }
  __device__ __forceinline__ float number_of(int j, uint32_t raw) const {
    switch (params_.format) {
      case TILEMOE_FORMAT_MXFP4: return e8m0_to_float(static_cast<uint8_t>(raw));
      case TILEMOE_FORMAT_NVFP4:
        return __ldg(part(j).scale_of_scales + expert_) * e4m3_to_float(static_cast<uint8_t>(raw));
      case TILEMOE_FORMAT_NF4_DOUBLE: {
        const float outer = __ldg(part(j).scale_of_scales + index(j, block_) / kNf4NestedBlock);
        return __fadd_rn(__fmul_rn(__ldg(part(j).scale_map + raw), outer),
                         __ldg(part(j).scale_offset));
      }
      default: return __uint_as_float(raw);
    }
  }

  const CodesParams<kParts>& params_;
  int32_t expert_, first_row_;
  int32_t block_;          // the k block of raw_
  uint32_t raw_[kGroups];  // as read
  float scale_[kGroups];   // of the current k block
};

// The MMAs of one warp, of codes. The operand of an adapter's k blocks, which follow, is values.
template <class Shape, class A, int kParts, bool kChained>
class CodesMma {
 public:
  using Values = Mma<Shape, A, StagedOperand<Major::kK, Shape::BLOCK_N>>;
  using Fragments = typename Values::Fragments;
  using Element = typename Shape::Element;
  using Operand = CodesOperand<Shape::BLOCK_N>;
  static constexpr int kSteps = Values::kSteps;

  __device__ explicit CodesMma(const CodesParams<kParts>& params, int32_t blocks_of_values = 0)
      : params_(params),
        scales_(params),
        blocks_of_values_(blocks_of_values),
        number_(params.number[threadIdx.x % kCodes4]) {}
  template <class Params>
  __device__ explicit CodesMma(const Params& chained)
      : CodesMma(chained.first, chained.second_blocks) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    blocks_of_codes_ = tile.k_blocks - blocks_of_values_;
    scales_.begin(tile);
  }
  __device__ __forceinline__ void next_block() {
    if (kChained && --blocks_of_codes_ <= 0) return;
    scales_.next_block();
  }

  __device__ __forceinline__ void load(Fragments& to, uint32_t stage, int step) const {
    values_.load_a(to, stage, step);
    if (kChained && blocks_of_codes_ <= 0)
      values_.load_b(to, stage, step);
    else
      load_codes(to, stage + A::kBytes, step);
  }
  __device__ __forceinline__ static void multiply(Accumulators<Shape>& D, const Fragments& of) {
    Values::multiply(D, of);
  }

 private:
  __device__ __forceinline__ void load_codes(Fragments& to, uint32_t codes, int step) const {
    const uint32_t lane = threadIdx.x % kWarp, row = Shape::fragment_column() + lane / 4;
    if (params_.format == TILEMOE_FORMAT_FP8) {
      const uint32_t from =
          codes + row * Operand::kRowBytes8 + Operand::piece_of_fp8(row, step) + lane % 4 / 2 * 4;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const uint32_t at = from + j * 8 * Operand::kRowBytes8;
        set(to, j, 0, of_fp8(ptx::load_shared_4(at)), scales_.at(j));
        set(to, j, 1, of_fp8(ptx::load_shared_4(at + 8)), scales_.at(j));
      }
      return;
    }
    const bool is_nf4 =
        params_.format == TILEMOE_FORMAT_NF4 || params_.format == TILEMOE_FORMAT_NF4_DOUBLE;
    const uint32_t from = codes + row * Operand::kRowBytes4 + step * 8;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const uint2 words = ptx::load_shared_8(from + j * 8 * Operand::kRowBytes4);
      if (is_nf4) {
        set(to, j, 0, of_nf4(words.x), scales_.at(j));
        set(to, j, 1, of_nf4(words.y), scales_.at(j));
      } else {
        const float scale = scales_.at(j, step);
        set(to, j, 0, of_e2m1(words.x), scale);
        set(to, j, 1, of_e2m1(words.y), scale);
      }
    }
  }
  // The steps 8 half + 2 (lane % 4) and the next of K, of group j of columns.
  __device__ __forceinline__ static void set(Fragments& to, int j, int half, float2 numbers,
                                             float scale) {
    to.b[j / 2][j % 2 * 2 + half] = pack(numbers.x * scale, numbers.y * scale, Element());
  }

  // ---- two codes of this lane in a word that four lanes share: 8 codes of 4 bits, or half of the
  // 8 of FP8

  __device__ static float2 of_fp8(uint32_t word) {
    const auto pair = static_cast<uint16_t>(word >> threadIdx.x % 2 * 16);
#if __CUDA_ARCH__ >= 890
    return unpack(ptx::e4m3_to_float16(pair), __half());
#else
    return {e4m3_to_float(static_cast<uint8_t>(pair)),
            e4m3_to_float(static_cast<uint8_t>(pair >> 8))};
#endif
  }
  // A lane has the number of one code: fewer instructions than a table in registers takes.
  __device__ __forceinline__ float2 of_nf4(uint32_t word) const {
    const uint32_t codes = word >> threadIdx.x % 4 * 8;
    return {__shfl_sync(kAllLanes, number_, static_cast<int>(codes >> 4 & 15), kCodes4),
            __shfl_sync(kAllLanes, number_, static_cast<int>(codes & 15), kCodes4)};
  }
  // s ee m of exponent bias 1 moves into float16's place, and is rebased by an exact product, which
  // also makes subnormal numbers normal.
  __device__ __forceinline__ static float2 of_e2m1(uint32_t word) {
    const uint32_t byte = threadIdx.x % 4;
    // The first code in bits 12 to 15, the second in bits 28 to 31.
    const uint32_t codes = __byte_perm(word << 4, word, byte << 4 | (4 + byte) << 12);
    const uint32_t halves = (codes & 0x80008000u) | (codes >> 3 & 0x0e000e00u);
    const __half2 scaled =
        __hmul2(reinterpret_cast<const __half2&>(halves), __floats2half2_rn(0x1p14f, 0x1p14f));
    return __half22float2(scaled);
  }

  static constexpr int kGroups = CodeScales<Shape, kParts>::kGroups;

  const CodesParams<kParts>& params_;
  const Values values_;
  CodeScales<Shape, kParts> scales_;
  int32_t blocks_of_values_;
  int32_t blocks_of_codes_ = 0;  // left of the tile, with the current one
  float number_;                 // of NF4's code lane % 16
};

template <class Shape, class LoadA, int kParts>
struct MmaOf<Shape, LoadA, Codes<Shape, kParts>> {
  using type = CodesMma<Shape, typename LoadA::Operand, kParts, false>;
};
template <class Shape, class LoadA, int kParts, class Second>
struct MmaOf<Shape, LoadA, Chained<Codes<Shape, kParts>, Second>> {
  using type = CodesMma<Shape, typename LoadA::Operand, kParts, true>;
};

}  // namespace tilemoe::cuda::sm80
