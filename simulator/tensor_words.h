// The words by which tcgen05.mma of 16-bit operands knows what to read and how to multiply it (PTX
// ISA, "Instruction descriptor" and "Shared memory descriptor" of tcgen05), decoded from their bits.
#pragma once

#include <cstdint>

#include "simulator/matrix_descriptor.h"
#include "simulator/tensor_core.h"

namespace tilemoe::simulator {

// D (rows, columns) in float32 of A (rows, 16) and B (columns, 16). Of a pair of blocks each has
// half of the rows of A, of B and of D.
struct TensorInstruction {
  OperandType type;
  int rows, columns;
  OperandMajor a_major, b_major;
};

// Of .kind::f16, for 1 block or 2. Throws std::invalid_argument, with the reason, for what has no
// meaning, and for what no kernel here asks for: sparse operands, negated ones, sums in 16 bits,
// another number of rows than 128 of a block.
TensorInstruction decode_tensor_instruction(uint32_t bits, int blocks);

// Of an operand. Throws the same for what decode_matrix_descriptor() refuses of wgmma's, and for
// another version than Blackwell's.
MatrixDescriptor decode_tensor_descriptor(uint64_t bits);

}  // namespace tilemoe::simulator
