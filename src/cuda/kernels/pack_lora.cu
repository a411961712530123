// Packs the factors of low-rank adapters: copies of any strides and float types, scaled and
// rounded. One launch for all copies.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/dtype.h"
#include "core/numbers.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 16;  // elements of a thread, whose loads are in flight together
constexpr int kTile = kThreads * kAtOnce;
constexpr int kVector = 8;      // elements that are loaded and stored together, if strides allow it
constexpr int kMaxLines = 256;  // of a tile that passes through shared memory, with padded lines

// A dimension of both sides of a copy: strides in elements.
struct Dimension {
  int64_t size = 1, from = 0, to = 0;
};

// A tile has up to `width` elements of the first dimension, in which `to` is contiguous, by `lines`
// of the second, and one of the third. If `from` is contiguous in the second, the copy transposes.
struct CopyTiles {
  const void* from;  // null: zeros
  void* to;
  tilemoe_dtype from_dtype;
  float scale;
  Dimension dimension[3];
  int32_t log_width, log_lines;
  bool transposes;
  bool vectors;          // of kVector elements
  int64_t across, down;  // tiles along the first and the second dimension
  int64_t end;           // the number after its last tile's, counted over all copies
};

struct PackParams {
  CopyTiles copy[std::extent_v<decltype(LoraPacking::copy)>];
};

template <class From>
__device__ __forceinline__ void load_vector(const From* from, float (&value)[kVector]) {
  constexpr int kAtATime = sizeof(uint4) / sizeof(From);
#pragma unroll
  for (int first = 0; first < kVector; first += kAtATime) {
    const uint4 bytes = ptx::load_global_once_16(from + first);
    From numbers[kAtATime];
    memcpy(numbers, &bytes, sizeof bytes);
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) value[first + i] = to_float(numbers[i]);
  }
}

template <class To>
__device__ __forceinline__ void store_vector(To* to, const float (&value)[kVector], float scale) {
  To numbers[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) store(scale * value[i], numbers[i]);
  uint4 bytes;
  memcpy(&bytes, numbers, sizeof bytes);
  *reinterpret_cast<uint4*>(to) = bytes;
}

// A tile of `high` lines of `wide` elements, in vectors.
template <class From, class To>
__device__ __forceinline__ void copy_vectors(const CopyTiles& copy, const From* from, To* to,
                                             int32_t wide, int32_t high) {
  constexpr int kVectors = kAtOnce / kVector;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  // Calls body(column, line) of this thread's vector k, if it exists.
  const auto at = [&](int k, const auto& body) {
    const int32_t i = (thread + k * kThreads) * kVector;
    const int32_t column = i & ((1 << copy.log_width) - 1), line = i >> copy.log_width;
    if (column < wide && line < high) body(column, line);
  };
  float value[kVectors][kVector];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    at(k, [&](int32_t column, int32_t line) {
      load_vector(from + column + line * copy.dimension[1].from, value[k]);
    });
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    at(k, [&](int32_t column, int32_t line) {
      store_vector(to + column + line * copy.dimension[1].to, value[k], copy.scale);
    });
}

// Loads along the lines of `from`, stores along those of `to`.
template <class From, class To>
__device__ __forceinline__ void copy_tile(const CopyTiles& copy, int64_t tile, float* transposed) {
  const auto& [x, y, z] = copy.dimension;
  const int64_t line_of_tiles = tile / copy.across, outer = line_of_tiles / copy.down;
  const int64_t first_x = (tile - line_of_tiles * copy.across) << copy.log_width;
  const int64_t first_y = (line_of_tiles - outer * copy.down) << copy.log_lines;
  const auto* const from =
      static_cast<const From*>(copy.from) + first_x * x.from + first_y * y.from + outer * z.from;
  To* const to = static_cast<To*>(copy.to) + first_x * x.to + first_y * y.to + outer * z.to;
  const int32_t width = 1 << copy.log_width, lines = 1 << copy.log_lines;
  const auto wide = static_cast<int32_t>(min(int64_t{width}, x.size - first_x));
  const auto high = static_cast<int32_t>(min(int64_t{lines}, y.size - first_y));
  const auto thread = static_cast<int32_t>(threadIdx.x);

  if (copy.vectors) return copy_vectors(copy, from, to, wide, high);

  float value[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int32_t i = thread + k * kThreads;
    const int32_t column = copy.transposes ? i >> copy.log_lines : i & (width - 1);
    const int32_t line = copy.transposes ? i & (lines - 1) : i >> copy.log_width;
    const bool exists = column < wide && line < high && copy.from != nullptr;
    value[k] = exists ? to_float(from[column * x.from + line * y.from]) : 0.f;
  }
  if (copy.transposes) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int32_t i = thread + k * kThreads;
      const int32_t column = i >> copy.log_lines, line = i & (lines - 1);
      if (column < width) transposed[line * (width + 1) + column] = value[k];
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int32_t i = thread + k * kThreads;
    const int32_t column = i & (width - 1), line = i >> copy.log_width;
    if (column >= wide || line >= high) continue;
    const float number = copy.transposes ? transposed[line * (width + 1) + column] : value[k];
    store(copy.scale * number, to[column * x.to + line * y.to]);
  }
}

template <class To>
__global__ void __launch_bounds__(kThreads)
    pack_factors(const __grid_constant__ PackParams params) {
  __shared__ float transposed[kTile + kMaxLines];
  const int64_t tile = blockIdx.x;
  int32_t i = 0;
  while (tile >= params.copy[i].end) ++i;
  const CopyTiles& copy = params.copy[i];
  const int64_t of_copy = i == 0 ? tile : tile - params.copy[i - 1].end;
  switch (copy.from_dtype) {
    case TILEMOE_BFLOAT16: return copy_tile<BFloat16, To>(copy, of_copy, transposed);
    case TILEMOE_FLOAT16: return copy_tile<Float16, To>(copy, of_copy, transposed);
    default: return copy_tile<float, To>(copy, of_copy, transposed);
  }
}

// The dimensions of a copy, by ascending stride of `to`. Two that are one dimension in both tensors
// are merged. Returns their number.
int dimensions_of(const LoraPacking::Copy& copy, Dimension (&dimension)[3]) {
  // Zeros are read from nowhere.
  const tilemoe_tensor &to = copy.to, &from = present(copy.from) ? copy.from : copy.to;
  for (int i = 0; i < 3; ++i) dimension[i] = {to.shape[i], from.stride[i], to.stride[i]};
  auto* end = std::remove_if(std::begin(dimension), std::end(dimension),
                             [](const Dimension& one) { return one.size == 1; });
  std::sort(dimension, end, [](const Dimension& a, const Dimension& b) { return a.to < b.to; });
  for (auto* one = dimension; one + 1 < end;) {
    const Dimension& next = one[1];
    if (next.to != one->to * one->size || next.from != one->from * one->size) {
      ++one;
      continue;
    }
    one->size *= next.size;
    std::copy(one + 2, end, one + 1);
    --end;
  }
  std::fill(end, std::end(dimension), Dimension{});
  return static_cast<int>(end - dimension);
}

// Whether the lines of both sides consist of whole vectors on 16 bytes.
bool has_vectors(const CopyTiles& tiles) {
  const auto& [x, y, z] = tiles.dimension;
  const auto whole = [](int64_t count) { return count % kVector == 0; };
  const auto aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0;
  };
  return tiles.from != nullptr && x.from == 1 && x.to == 1 && whole(x.size) && whole(y.from) &&
         whole(y.to) && whole(z.from) && whole(z.to) && aligned(tiles.from) && aligned(tiles.to);
}

int32_t log_of(int64_t size) {  // of the next power of two
  return static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(size - 1)));
}

// Its tiles, the first of which has the number `begin`.
CopyTiles tiles_of(const LoraPacking::Copy& copy, int64_t begin) {
  constexpr int32_t kLogTile = std::bit_width(unsigned{kTile}) - 1;
  constexpr int32_t kLogMaxLines = std::bit_width(unsigned{kMaxLines}) - 1;
  static_assert(1 << kLogTile == kTile && 1 << kLogMaxLines == kMaxLines);
  CopyTiles tiles{.from = copy.from.data,
                  .to = copy.to.data,
                  .from_dtype = present(copy.from) ? copy.from.dtype : TILEMOE_FLOAT32,
                  .scale = present(copy.from) ? copy.scale : 0};
  Dimension* const dimension = tiles.dimension;
  const int count = dimensions_of(copy, tiles.dimension);
  auto* const innermost =
      std::min_element(dimension, dimension + count,
                       [](const Dimension& a, const Dimension& b) { return a.from < b.from; });
  tiles.transposes = innermost > dimension;
  if (tiles.transposes) std::swap(dimension[1], *innermost);

  const int32_t wide = log_of(dimension[0].size), high = log_of(dimension[1].size);
  if (tiles.transposes) {
    tiles.log_lines = std::min({high, kLogMaxLines, kLogTile - std::min(wide, kLogTile / 2)});
    tiles.log_width = std::min(wide, kLogTile - tiles.log_lines);
  } else {
    tiles.log_width = std::min(wide, kLogTile);
    tiles.log_lines = std::min(high, kLogTile - tiles.log_width);
  }
  tiles.vectors = has_vectors(tiles);
  const auto blocks = [](int64_t size, int32_t log) { return (size - 1 >> log) + 1; };
  tiles.across = blocks(dimension[0].size, tiles.log_width);
  tiles.down = blocks(dimension[1].size, tiles.log_lines);
  tiles.end = begin + tiles.across * tiles.down * dimension[2].size;
  return tiles;
}

}  // namespace

void pack_lora(const tilemoe_experts& experts, const LoraPacking& packing, void* stream) {
  PackParams params{};
  int64_t tiles = 0;
  for (int i = 0; i < packing.count; ++i) {
    const LoraPacking::Copy& copy = packing.copy[i];
    if (present(copy.from)) with_float(copy.from.dtype, [&]<class From>() {});
    params.copy[i] = tiles_of(copy, tiles);
    tiles = params.copy[i].end;
  }
  if (tiles == 0) return;
  TILEMOE_CHECK_SUPPORTED(tiles <= INT32_MAX, "factors of " << tiles << " tiles to pack");
  const auto kernel =
      with_one_of<BFloat16, Float16>(experts.dtype, [&]<class To>() { return &pack_factors<To>; });
  launch_kernel("packing the factors of adapters",
                {.blocks = static_cast<unsigned>(tiles),
                 .threads = kThreads,
                 .stream = static_cast<cudaStream_t>(stream)},
                kernel, params);
}

}  // namespace tilemoe::cuda
