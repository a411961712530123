// Codes and scales of the fp8 recipe (core/fp8.h): bound by the bytes of values and codes. A CTA has
// 128 x 128 values, a thread 8 values of each of 8 rows, which it reads before it uses the first.
// Transposed codes pass through shared memory, so that both layouts are written in whole lines.
#include <cstdint>

#include "core/check.h"
#include "core/fp8.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/convert.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;                       // values of a thread in a row
constexpr int kRowThreads = kFp8Tile / kVector;  // of a row: half a warp
constexpr int kTileRows = kFp8Tile;
constexpr int kAtOnce = kTileRows * kRowThreads / kThreads;
constexpr int kRowStep = kThreads / kRowThreads;  // between two rows of a thread
constexpr int kRowWords = kFp8Tile / 4;           // of codes

struct QuantizeParams {
  const char* values;
  uint8_t* codes;
  float* scales;
  int64_t expert_bytes, row_bytes;  // of values
  int32_t rows, columns;
  int32_t part_rows, part_tiles;  // tiles of a part, one below the other
  int32_t tiles_down, across;     // of an expert
  float largest;
  bool power_of_two;
  const int32_t* end;  // of the rows that are quantised; null: all
  uint8_t* transposed_codes;
  float* transposed_scales;
};

// A CTA's tile: its expert, first row, rows and number of the first column.
struct QuantizeTile {
  int32_t expert, number, row, rows, column;

  __device__ explicit QuantizeTile(const QuantizeParams& params) {
    const auto tile = static_cast<int32_t>(blockIdx.x);
    column = tile % params.across * static_cast<int32_t>(kFp8Tile);
    number = tile / params.across % params.tiles_down;
    expert = tile / params.across / params.tiles_down;
    const int32_t in_part = number % params.part_tiles * kTileRows;
    row = number / params.part_tiles * params.part_rows + in_part;
    rows = min(kTileRows, params.part_rows - in_part);
    if (params.end != nullptr) rows = min(rows, __ldg(params.end) - row);  // may be negative
  }
};

// The values of a thread in a row, as they lie in memory.
template <class Element>
struct RowValues {
  static constexpr int kWords = kVector * static_cast<int>(sizeof(Element)) / 16;
  uint4 words[kWords] = {};

  __device__ void load(const void* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(static_cast<const uint4*>(from) + i);
  }
  __device__ void unpack(float (&value)[kVector]) const {
    if constexpr (kWords == 1) {
      unpack_eight<Element>(words[0], value);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        value[4 * i] = __uint_as_float(words[i].x), value[4 * i + 1] = __uint_as_float(words[i].y);
        value[4 * i + 2] = __uint_as_float(words[i].z);
        value[4 * i + 3] = __uint_as_float(words[i].w);
      }
    }
  }
};

__device__ __forceinline__ uint2 codes_of(const float (&value)[kVector], float factor) {
  uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float low = value[i] * factor, high = value[i + 1] * factor;
#if __CUDA_ARCH__ >= 890
    const uint32_t pair = ptx::float_to_e4m3(low, high);
#else
    const uint32_t pair = to_e4m3(low) | static_cast<uint32_t>(to_e4m3(high)) << 8;
#endif
    word[i / 4] |= pair << i % 4 * 8;
  }
  return {word[0], word[1]};
}

// The largest magnitude of a thread's values; the maximum over the lanes of a row; over the CTA. A
// maximum leaves NaNs out.
__device__ __forceinline__ float max_of(const float (&value)[kVector]) {
  float amax = 0.f;
#pragma unroll
  for (const float x : value) amax = fmaxf(amax, fabsf(x));
  return amax;
}
__device__ __forceinline__ float row_max(float value) {
#pragma unroll
  for (int step = kRowThreads / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
__device__ __forceinline__ float tile_max(float value) {
  __shared__ float of_warps[kThreads / kWarp];
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, kRowThreads));
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  float all = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarp; ++warp) all = fmaxf(all, of_warps[warp]);
  return all;
}

// A tile of codes between its two layouts. The words of 8 rows are exchanged in pairs, so that
// neither side has bank conflicts.
class TileOfCodes {
 public:
  __device__ explicit TileOfCodes(uint2* tile) : tile_(tile) {}

  __device__ void write(int32_t row, int32_t column, uint2 codes) const {
    tile_[word_of(row, column / 4) / 2] = codes;
  }
  // The codes of 4 columns from `column` on, each of 8 rows from `row` on.
  __device__ void read(int32_t row, int32_t column, uint2 (&codes)[4]) const {
    uint32_t low[4], high[4];
    transpose(row, column, low);
    transpose(row + 4, column, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = {low[i], high[i]};
  }

 private:
  __device__ static int32_t word_of(int32_t row, int32_t word) {
    return row * kRowWords + (word ^ row / 8 * 2);
  }
  __device__ void transpose(int32_t row, int32_t column, uint32_t (&of_column)[4]) const {
    const auto* const words = reinterpret_cast<const uint32_t*>(tile_);
    uint32_t of_row[4], first[2], second[2];  // two columns of two rows
#pragma unroll
    for (int i = 0; i < 4; ++i) of_row[i] = words[word_of(row + i, column / 4)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] = __byte_perm(of_row[2 * i], of_row[2 * i + 1], 0x5140);
      second[i] = __byte_perm(of_row[2 * i], of_row[2 * i + 1], 0x7362);
    }
    of_column[0] = __byte_perm(first[0], first[1], 0x5410);
    of_column[1] = __byte_perm(first[0], first[1], 0x7632);
    of_column[2] = __byte_perm(second[0], second[1], 0x5410);
    of_column[3] = __byte_perm(second[0], second[1], 0x7632);
  }

  uint2* tile_;  // (kTileRows, kRowWords / 2)
};

// Stores the tile with rows and columns exchanged: 16 lanes have the 128 codes of a column.
__device__ __forceinline__ void store_transposed(const QuantizeParams& params,
                                                 const QuantizeTile& tile,
                                                 const TileOfCodes& codes) {
  constexpr int32_t kOctets = kTileRows / 8;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t row = thread % kOctets * 8;
  if (row >= tile.rows) return;
#pragma unroll 1
  for (int32_t quad = thread / kOctets; quad < kRowWords; quad += kThreads / kOctets) {
    const int32_t column = tile.column + quad * 4;
    if (column >= params.columns) return;
    uint2 of_column[4];
    codes.read(row, quad * 4, of_column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint8_t* const to = params.transposed_codes +
                          (int64_t{tile.expert} * params.columns + column + i) * params.rows +
                          tile.row + row;
      if (params.part_rows % 8 == 0) {  // of rows that are multiples of 8
        *reinterpret_cast<uint2*>(to) = of_column[i];
      } else {
        const uint64_t eight = uint64_t{of_column[i].y} << 32 | of_column[i].x;
        for (int32_t j = 0; j < min(8, tile.rows - row); ++j)
          to[j] = static_cast<uint8_t>(eight >> 8 * j);
      }
    }
  }
}

// kTiles: blocks of 128 x 128, else of 1 x 128. kTransposes: also stores the transposed codes. Those,
// and float32 values, spill with three CTAs per SM.
template <class Element, bool kTiles, bool kTransposes>
__global__ void __launch_bounds__(kThreads, kTransposes || sizeof(Element) > 2 ? 2 : 3)
    quantize_blocks(const __grid_constant__ QuantizeParams params) {
  const QuantizeTile tile(params);
  if (tile.rows <= 0) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t first_row = thread / kRowThreads;
  const int32_t column = tile.column + thread % kRowThreads * kVector;
  const bool has_columns = column < params.columns;
  const char* const from = params.values + tile.expert * params.expert_bytes +
                           int64_t{column} * static_cast<int>(sizeof(Element));
  RowValues<Element> of_row[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int32_t row = first_row + k * kRowStep;
    if (has_columns && row < tile.rows)
      of_row[k].load(from + int64_t{tile.row + row} * params.row_bytes);
  }
  const int32_t scale_column = tile.column / static_cast<int32_t>(kFp8Tile);
  float factor;
  if constexpr (kTiles) {
    float amax = 0.f;
#pragma unroll
    for (const RowValues<Element>& eight : of_row) {
      float value[kVector];
      eight.unpack(value);
      amax = fmaxf(amax, max_of(value));
    }
    factor = fp8_factor(tile_max(row_max(amax)), params.largest, params.power_of_two);
    if (thread == 0)
      params.scales[(int64_t{tile.expert} * params.tiles_down + tile.number) * params.across +
                    scale_column] = 1.f / factor;
    if (kTransposes && thread == 0)
      params.transposed_scales[(int64_t{tile.expert} * params.across + scale_column) *
                                   params.tiles_down +
                               tile.number] = 1.f / factor;
  }
  __shared__ uint2 tile_of_codes[kTransposes ? kTileRows * kRowWords / 2 : 1];
  const TileOfCodes transposed(tile_of_codes);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int32_t row = first_row + k * kRowStep;
    const int64_t place = int64_t{tile.expert} * params.rows + tile.row + row;
    float value[kVector];
    of_row[k].unpack(value);
    if constexpr (!kTiles) {
      factor = fp8_factor(row_max(max_of(value)), params.largest, params.power_of_two);
      if (row < tile.rows && thread % kRowThreads == 0)
        params.scales[place * params.across + scale_column] = 1.f / factor;
    }
    const uint2 codes = codes_of(value, factor);
    if (has_columns && row < tile.rows)
      *reinterpret_cast<uint2*>(params.codes + place * params.columns + column) = codes;
    if constexpr (kTransposes) transposed.write(row, thread % kRowThreads * kVector, codes);
  }
  if constexpr (kTransposes) {
    __syncthreads();
    store_transposed(params, tile, transposed);
  }
}

}  // namespace

void quantize_fp8(const tilemoe_quantize_fp8_args& args, const int32_t* end) {
  const tilemoe_tensor& values = args.values;
  const int64_t E = values.shape[0], R = values.shape[1], C = values.shape[2];
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(values.dtype));
  const int64_t part_tiles = blocks_of(args.part_rows, kTileRows);
  const QuantizeParams params{.values = static_cast<const char*>(values.data),
                              .codes = args.codes,
                              .scales = args.scales,
                              .expert_bytes = values.stride[0] * element,
                              .row_bytes = values.stride[1] * element,
                              .rows = static_cast<int32_t>(R),
                              .columns = static_cast<int32_t>(C),
                              .part_rows = static_cast<int32_t>(args.part_rows),
                              .part_tiles = static_cast<int32_t>(part_tiles),
                              .tiles_down = static_cast<int32_t>(R / args.part_rows * part_tiles),
                              .across = static_cast<int32_t>(blocks_of(C, kFp8Tile)),
                              .largest = largest_of(values.dtype),
                              .power_of_two = args.float_scales == 0,
                              .end = end,
                              .transposed_codes = args.transposed_codes,
                              .transposed_scales = args.transposed_scales};
  const int64_t tiles = E * params.tiles_down * params.across;
  TILEMOE_CHECK_SUPPORTED(tiles <= INT32_MAX, tiles << " blocks to quantise");
  if (tiles == 0) return;
  const KernelLaunch where{.blocks = dim3(static_cast<unsigned>(tiles)),
                           .threads = kThreads,
                           .stream = static_cast<cudaStream_t>(args.stream)};
  with_one_of<float, __nv_bfloat16, __half>(values.dtype, [&]<class Element>() {
    if (args.block_rows == 1)
      launch_kernel("quantising rows", where, &quantize_blocks<Element, false, false>, params);
    else if (args.transposed_codes == nullptr)
      launch_kernel("quantising tiles", where, &quantize_blocks<Element, true, false>, params);
    else
      launch_kernel("quantising tiles twice", where, &quantize_blocks<Element, true, true>, params);
  });
}

}  // namespace tilemoe::cuda
