// Values of quantised weights, written as 16-bit ones for the GEMMs: bound by the bytes of codes
// and values. A thread computes 8 values at a time, which share a scale in every format: one store
// of 16 bytes. A warp reads and writes whole cache lines.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "core/check.h"
#include "core/dtype.h"
#include "core/formats.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/convert.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;
constexpr int kVector = 8;  // values of a store
constexpr int kAtOnce = 8;  // vectors of a thread, whose loads are in flight together
constexpr int kTile = kThreads * kAtOnce;  // vectors of a CTA
constexpr int kLogTile = std::bit_width(unsigned{kTile}) - 1;
static_assert(1 << kLogTile == kTile);
// Experts of a CTA, one after another: a CTA costs more than to find that an expert has no rows.
constexpr int kExperts = 4;

// A tile of FP8 has 1 << log_width vectors of each row, and rows that share their scales. The other
// formats have one row per expert.
struct DequantizeParams {
  const void* codes;
  const void* scales;
  const float* scale_map;
  const float* scale_of_scales;
  const float* scale_offset;
  float number[kCodes4];  // of the codes, of 4 bits
  char* out;
  const int32_t* begins;  // (experts) null: all have rows
  const int32_t* ends;
  int32_t experts;
  int64_t first;    // expert of the weight
  int64_t vectors;  // of an expert
  // FP8
  int32_t rows, row_vectors;
  int32_t log_width, across;  // tiles of a row
  int32_t scale_rows, scale_columns;
};

template <tilemoe_format kFormat>
constexpr bool kIsNf4 = is_nf4(kFormat);

// Vectors that share a scale, in the order of the codes.
constexpr int vectors_of_scale(tilemoe_format format) {
  switch (format) {
    case TILEMOE_FORMAT_MXFP4: return kMxfp4Block / kVector;
    case TILEMOE_FORMAT_NVFP4: return kNvfp4Block / kVector;
    default: return kNf4Block / kVector;
  }
}

// ---- codes

// 8 codes as they lie in memory, and the values of the codes.

__device__ __forceinline__ void values_of(uint2 codes, float (&value)[kVector]) {
  const uint32_t word[2] = {codes.x, codes.y};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const auto pair = static_cast<uint16_t>(word[i / 4] >> i % 4 * 8);
#if __CUDA_ARCH__ >= 890
    const float2 two = unpack(ptx::e4m3_to_float16(pair), __half());
    value[i] = two.x, value[i + 1] = two.y;
#else
    value[i] = e4m3_to_float(static_cast<uint8_t>(pair));
    value[i + 1] = e4m3_to_float(static_cast<uint8_t>(pair >> 8));
#endif
  }
}

// 16 numbers lie in 16 banks, so that no lookup of a warp waits for another one.
template <bool kHighFirst>
__device__ __forceinline__ void values_of(uint32_t codes, const float* numbers,
                                          float (&value)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int nibble = kHighFirst ? i ^ 1 : i;
    value[i] = numbers[codes >> 4 * nibble & 0xf];
  }
}

// ---- the vectors of a CTA

// Vectors of an expert: the first one, and `count` of them `step` apart.
struct Vectors {
  int64_t first, step;
  int count;
};

template <tilemoe_format kFormat, class Element>
class Dequantizer {
 public:
  static constexpr bool kFp8 = kFormat == TILEMOE_FORMAT_FP8;
  static constexpr bool kDouble = kFormat == TILEMOE_FORMAT_NF4_DOUBLE;
  static constexpr bool kFloatScales = kFp8 || kFormat == TILEMOE_FORMAT_NF4;
  using Codes = std::conditional_t<kFp8, uint2, uint32_t>;
  using Scale = std::conditional_t<kFloatScales, float, uint8_t>;

  struct Shared {
    float number[kCodes4];
    float scale_map[kDouble ? 256 : 1];
  };

  __device__ Dequantizer(const DequantizeParams& params, Shared& shared)
      : params_(params), shared_(shared) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if constexpr (kFp8) return;
    if (thread < kCodes4) shared.number[thread] = params.number[thread];
    if constexpr (kDouble) shared.scale_map[thread] = params.scale_map[thread];
    __syncthreads();
  }

  // Writes tile blockIdx.x of an expert, which is `in_block` of those to be written.
  __device__ __forceinline__ void write(int64_t in_block) const {
    const int64_t expert = params_.first + in_block;
    const Vectors vectors = vectors_of_thread();
    const int64_t first = expert * params_.vectors + vectors.first;
    const auto* const codes = static_cast<const Codes*>(params_.codes) + first;
    const auto* const scales = scales_of(expert, first);
    auto* const out =
        reinterpret_cast<uint4*>(params_.out) + in_block * params_.vectors + vectors.first;
    Codes code[kAtOnce];
    Scale scale[kAtOnce];
    float outer[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k >= vectors.count) continue;
      code[k] = __ldg(codes + k * vectors.step);
      if (!kFp8 || k == 0) scale[k] = __ldg(scales + k * (kThreads / kScaleVectors));
      if constexpr (kDouble)
        outer[k] = __ldg(params_.scale_of_scales +
                         (first + k * kThreads) / (kScaleVectors * kNf4NestedBlock));
    }
    const float of_expert =
        kFormat == TILEMOE_FORMAT_NVFP4 ? __ldg(params_.scale_of_scales + expert) : 0.f;
    const float offset = kDouble ? __ldg(params_.scale_offset) : 0.f;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k >= vectors.count) continue;
      float value[kVector];
      float factor;
      if constexpr (kFloatScales)
        factor = scale[kFp8 ? 0 : k];
      else if constexpr (kDouble)
        factor = shared_.scale_map[scale[k]] * outer[k] + offset;  // (not contracted)
      else if constexpr (kFormat == TILEMOE_FORMAT_NVFP4)
        factor = of_expert * e4m3_to_float(scale[k]);
      else
        factor = e8m0_to_float(scale[k]);
      if constexpr (kFp8) {
        values_of(code[k], value);
      } else {
        values_of<kIsNf4<kFormat>>(code[k], shared_.number, value);
      }
#pragma unroll
      for (float& number : value) number *= factor;
      out[k * vectors.step] = pack_eight<Element>(value);
    }
  }

 private:
  static constexpr int kScaleVectors = vectors_of_scale(kFormat);

  __device__ __forceinline__ Vectors vectors_of_thread() const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if constexpr (kFp8) {
      const int32_t row = first_row() + (thread >> params_.log_width), column = column_of_thread();
      const int32_t step = kThreads >> params_.log_width;
      const int32_t left = column < params_.row_vectors ? params_.rows - row + step - 1 : 0;
      return {int64_t{row} * params_.row_vectors + column, int64_t{step} * params_.row_vectors,
              left < step ? 0 : min(left / step, kAtOnce)};
    } else {
      const int64_t first = int64_t{blockIdx.x} * kTile + thread;
      const int64_t left = params_.vectors - first + kThreads - 1;
      return {first, kThreads, static_cast<int>(min(left / kThreads, int64_t{kAtOnce}))};
    }
  }

  // Of the tile blockIdx.x of FP8.
  __device__ __forceinline__ int32_t first_row() const {
    return static_cast<int32_t>(blockIdx.x) / params_.across << (kLogTile - params_.log_width);
  }
  __device__ __forceinline__ int32_t column_of_thread() const {
    const int32_t tile = static_cast<int32_t>(blockIdx.x) % params_.across;
    return (tile << params_.log_width) +
           (static_cast<int32_t>(threadIdx.x) & ((1 << params_.log_width) - 1));
  }

  // The scale of the thread's first vector. FP8: of all of them.
  __device__ __forceinline__ const Scale* scales_of(int64_t expert, int64_t first) const {
    const auto* const scales = static_cast<const Scale*>(params_.scales);
    if constexpr (!kFp8) return scales + first / kScaleVectors;
    const int64_t row = expert * params_.scale_rows + first_row() / kFp8Tile;
    return scales + row * params_.scale_columns + column_of_thread() / (kFp8Tile / kVector);
  }

  const DequantizeParams& params_;
  const Shared& shared_;
};

// A CTA has one tile of some experts, blockIdx.y, blockIdx.y + gridDim.y, ..., and finds those with
// rows 32 at a time.
template <tilemoe_format kFormat, class Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dequantize_values(const __grid_constant__ DequantizeParams params) {
  using Work = Dequantizer<kFormat, Element>;
  __shared__ typename Work::Shared shared;
  const Work work(params, shared);
  const auto step = static_cast<int32_t>(gridDim.y);
  for (int32_t chunk = static_cast<int32_t>(blockIdx.y); chunk < params.experts;
       chunk += kWarp * step) {
    const int64_t mine = chunk + int64_t{fragment::lane()} * step;
    bool has_rows = mine < params.experts;
    if (has_rows && params.begins != nullptr) has_rows = params.begins[mine] < params.ends[mine];
    uint32_t with_rows = __ballot_sync(kAllLanes, has_rows);
    while (with_rows != 0) {
      const int32_t lane = __ffs(static_cast<int>(with_rows)) - 1;
      with_rows &= with_rows - 1;
      work.write(chunk + int64_t{lane} * step);
    }
  }
}

// ---- the launch

// A row of FP8 is cut into the widest tiles that leave few threads idle; the narrowest one has as
// many rows as share a scale.
int32_t log_width_of(int64_t row_vectors) {
  constexpr int32_t kWidest = 7, kNarrowest = 4;
  static_assert(kTile >> kNarrowest == kFp8Tile);
  for (int32_t log = kWidest; log > kNarrowest; --log) {
    const int64_t width = int64_t{1} << log;
    if (blocks_of(row_vectors, width) * width * 15 <= row_vectors * 16) return log;
  }
  return kNarrowest;
}

}  // namespace

void dequantize(const Dequantize& step) {
  const tilemoe_quantized& weight = step.weight;
  const int64_t experts = step.out.shape[0], R = step.out.shape[1], C = step.out.shape[2];
  const float* const numbers = numbers_of(weight.format);
  DequantizeParams params{.codes = weight.codes,
                          .scales = weight.scales,
                          .scale_map = weight.scale_map,
                          .scale_of_scales = weight.scale_of_scales,
                          .scale_offset = weight.scale_offset,
                          .number = {},
                          .out = static_cast<char*>(step.out.data),
                          .begins = step.begins,
                          .ends = step.ends,
                          .experts = static_cast<int32_t>(experts),
                          .first = step.first,
                          .vectors = R * C / kVector};
  std::copy(numbers, numbers + kCodes4, params.number);
  int64_t tiles = blocks_of(params.vectors, kTile);
  if (weight.format == TILEMOE_FORMAT_FP8) {
    params.rows = static_cast<int32_t>(R), params.row_vectors = static_cast<int32_t>(C / kVector);
    params.log_width = log_width_of(params.row_vectors);
    params.across =
        static_cast<int32_t>(blocks_of(params.row_vectors, int64_t{1} << params.log_width));
    params.scale_rows = static_cast<int32_t>(blocks_of(R, kFp8Tile));
    params.scale_columns = static_cast<int32_t>(blocks_of(C, kFp8Tile));
    tiles = params.across * blocks_of(R, kTile >> params.log_width);
  }
  TILEMOE_CHECK_SUPPORTED(tiles <= INT32_MAX, "an expert of " << tiles << " tiles to dequantise");
  constexpr int64_t kMaxGridY = 65535;
  const KernelLaunch where{
      .blocks = dim3(static_cast<unsigned>(tiles),
                     static_cast<unsigned>(std::min(blocks_of(experts, kExperts), kMaxGridY))),
      .threads = kThreads,
      .stream = static_cast<cudaStream_t>(step.stream)};
  with_element(step.out.dtype, [&]<class Element>() {
    const auto launch = [&](auto kernel) {
      launch_kernel("dequantising a weight", where, kernel, params);
    };
    switch (weight.format) {
      case TILEMOE_FORMAT_FP8: return launch(&dequantize_values<TILEMOE_FORMAT_FP8, Element>);
      case TILEMOE_FORMAT_MXFP4: return launch(&dequantize_values<TILEMOE_FORMAT_MXFP4, Element>);
      case TILEMOE_FORMAT_NF4: return launch(&dequantize_values<TILEMOE_FORMAT_NF4, Element>);
      case TILEMOE_FORMAT_NF4_DOUBLE:
        return launch(&dequantize_values<TILEMOE_FORMAT_NF4_DOUBLE, Element>);
      case TILEMOE_FORMAT_NVFP4: return launch(&dequantize_values<TILEMOE_FORMAT_NVFP4, Element>);
      case TILEMOE_FORMAT_NONE: break;
    }
    TILEMOE_ASSERT(false, "a weight without a format");
  });
}

}  // namespace tilemoe::cuda
