// Tensor maps and the boxes that TMA copies by them: tiled mode, without interleaving.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "simulator/swizzle.h"

namespace tilemoe::simulator {

inline constexpr size_t kTensorMapBytes = 128;
inline constexpr int kMaxDimensions = 5;

// The arguments of cuTensorMapEncodeTiled; enumerators by their number.
struct TensorMapArguments {
  int data_type;  // CUtensorMapDataType
  uint32_t rank;
  uint64_t address;
  const uint64_t* size;             // (rank) in elements, fastest first
  const uint64_t* stride_bytes;     // (rank - 1) of the dimensions after the first
  const uint32_t* box;              // (rank) in elements
  const uint32_t* element_strides;  // (rank)
  int interleave, swizzle, l2_promotion, out_of_bounds_fill;
};

struct TensorMap {
  int rank;
  uint32_t element_bytes;
  uint64_t address;
  std::array<uint64_t, kMaxDimensions> size;
  std::array<uint64_t, kMaxDimensions - 1> stride_bytes;
  std::array<uint32_t, kMaxDimensions> box;
  Swizzle swizzle;

  // The bytes that a load counts at its barrier, with those outside of the tensor.
  uint32_t box_bytes() const;
};

// Writes a map to the 128 bytes at `map`, in the simulator's own encoding. Throws
// std::invalid_argument, with the reason, if the driver returns CUDA_ERROR_INVALID_VALUE, and for
// what the driver accepts but the simulator does not: interleaving, numbers of less than a byte,
// strides of elements, filling with NaN, the atoms of 32 and 64 bytes, and swizzled boxes narrower
// than the swizzle's span.
void encode_tensor_map(const TensorMapArguments& arguments, void* map);

// Throws std::invalid_argument if `map` has not been encoded, or has been overwritten since.
TensorMap decode_tensor_map(const void* map);

// 16 bytes of a box in shared memory. The part of them that is in the tensor comes from, or goes
// to, global memory; a load fills the rest with zeros, a store leaves it out.
struct BoxPiece {
  uint32_t shared;          // address, swizzled
  uint32_t skipped, bytes;  // that part begins so far into the piece and is so long, or 0
  uint64_t global;          // address of the part
};

// The pieces of the box at `coordinates`, one a dimension and fastest first, whose place in shared
// memory is `shared`. Throws std::invalid_argument where the number of coordinates is not the
// map's, or `shared` is not on 128 bytes.
std::vector<BoxPiece> box_pieces(const TensorMap& map, std::span<const int32_t> coordinates,
                                 uint32_t shared);

}  // namespace tilemoe::simulator
