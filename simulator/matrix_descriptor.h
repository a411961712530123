// The 64-bit descriptors by which wgmma finds its operands in shared memory (PTX ISA,
// "Asynchronous Warpgroup Level Matrix Shared Memory Layout").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "simulator/swizzle.h"

namespace tilemoe::simulator {

// Which dimension of an operand is contiguous: the one that is summed over, or the rows. It is a
// bit of the instruction ("tnspA"), not of the descriptor.
enum class OperandMajor { kK, kMN };

// In bytes. The two offsets depend on the order of the operand:
//                          leading_offset is from         stride_offset is from
//   K-major, no swizzle    8 steps of the sum to the next 8 rows to the next 8
//   K-major, swizzled      unused                         8 rows to the next 8
//   MN-major, no swizzle   8 steps of the sum to the next 8 rows to the next 8
//   MN-major, swizzled     a span of rows to the next     8 steps of the sum to the next
struct MatrixDescriptor {
  uint32_t start;
  uint32_t leading_offset, stride_offset;
  Swizzle swizzle;
};

// Throws std::invalid_argument, with the reason, for a descriptor with bits that have no meaning,
// or with a base offset: of a matrix whose pattern begins elsewhere than at a multiple of its
// period. No kernel here has one, and its arithmetic is not documented.
MatrixDescriptor decode_matrix_descriptor(uint64_t bits);

// The address of the 16-bit number of row `row` (of M or N) and step `step` of the sum, 0 to 15.
uint32_t element_address(const MatrixDescriptor& descriptor, OperandMajor major, int row, int step);

// 16 bytes of an operand. K-major: eight steps of one row, from `step` on; MN-major: eight rows of
// one step.
struct OperandPiece {
  uint32_t address;
  int row, step;
};
// All that one instruction reads of an operand of `rows` rows, a multiple of 8.
std::vector<OperandPiece> operand_pieces(const MatrixDescriptor& descriptor, OperandMajor major,
                                         int rows);

// An operand as simulator/tensor_core.h takes it, (rows, 16), from a block's shared memory, which
// begins at address 0. Throws std::out_of_range for a piece that lies outside.
std::vector<uint16_t> gather_operand(const MatrixDescriptor& descriptor, OperandMajor major,
                                     int rows, std::span<const std::byte> shared);

}  // namespace tilemoe::simulator
