// The descriptors of tcgen05.mma with 16-bit operands, decoded from their bits (PTX ISA,
// "Instruction descriptor" and "Shared memory descriptor" of tcgen05).
#pragma once

#include <cstdint>

#include "simulator/matrix_descriptor.h"
#include "simulator/tensor_core.h"

namespace tilemoe::simulator {

// D (rows, columns) in float32 of A (rows, 16) and B (columns, 16). Each CTA of a pair has half of
// the rows of A, of B and of D.
struct TensorInstruction {
  OperandType type;
  int rows, columns;
  OperandMajor a_major, b_major;
};

// Decodes an instruction descriptor of .kind::f16 for 1 or 2 CTAs. Throws std::invalid_argument,
// with the reason, for bits that have no meaning and for what no kernel here uses: sparse or
// negated operands, sums in 16 bits, a number of rows per CTA other than 128.
TensorInstruction decode_tensor_instruction(uint32_t bits, int ctas);

// Decodes an operand's descriptor. Throws the same for what decode_matrix_descriptor() refuses of
// wgmma's, and for a version other than Blackwell's.
MatrixDescriptor decode_tensor_descriptor(uint64_t bits);

}  // namespace tilemoe::simulator
