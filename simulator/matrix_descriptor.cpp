#include "simulator/matrix_descriptor.h"

#include <array>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace tilemoe::simulator {
namespace {

constexpr int kSteps = 16;

// A field of 14 bits holds an address or offset of 18 bits in units of 16 bytes.
uint32_t decode_bytes(uint64_t bits, int first_bit) {
  return static_cast<uint32_t>(bits >> first_bit & 0x3fff) << 4;
}

constexpr uint64_t kReserved =
    uint64_t{3} << 14 | uint64_t{3} << 30 | uint64_t{7} << 46 | uint64_t{0x3ff} << 52;

[[noreturn]] void refuse(uint64_t bits, const char* reason) {
  std::ostringstream message;
  message << "matrix descriptor 0x" << std::hex << bits << ": " << reason;
  throw std::invalid_argument(message.str());
}

}  // namespace

MatrixDescriptor decode_matrix_descriptor(uint64_t bits) {
  if ((bits & kReserved) != 0) refuse(bits, "bits are set that have no meaning");
  constexpr std::array kModes = {Swizzle::kNone, Swizzle::k128, Swizzle::k64, Swizzle::k32};
  const Swizzle swizzle = kModes[bits >> 62];
  if (swizzle != Swizzle::kNone && (bits >> 49 & 7) != 0) refuse(bits, "it has a base offset");
  return {.start = decode_bytes(bits, 0),
          .leading_offset = decode_bytes(bits, 16),
          .stride_offset = decode_bytes(bits, 32),
          .swizzle = swizzle};
}

uint32_t element_address(const MatrixDescriptor& descriptor, OperandMajor major, int row,
                         int step) {
  const auto r = static_cast<uint32_t>(row), k = static_cast<uint32_t>(step);
  const uint32_t span = swizzle_span(descriptor.swizzle);
  const uint32_t leading = descriptor.leading_offset, stride = descriptor.stride_offset;
  uint32_t offset;
  if (descriptor.swizzle == Swizzle::kNone) {  // core matrices of 8 x 16 bytes
    const uint32_t along = major == OperandMajor::kK ? k : r,
                   across = major == OperandMajor::kK ? r : k;
    offset = r / 8 * stride + k / 8 * leading + across % 8 * 16 + along % 8 * 2;
  } else if (major == OperandMajor::kK) {
    offset = r / 8 * stride + r % 8 * span + k * 2;
  } else {
    const uint32_t rows = span / 2;  // of a span
    offset = r / rows * leading + k / 8 * stride + k % 8 * span + r % rows * 2;
  }
  return swizzled(descriptor.swizzle, descriptor.start + offset);
}

std::vector<OperandPiece> operand_pieces(const MatrixDescriptor& descriptor, OperandMajor major,
                                         int rows) {
  std::vector<OperandPiece> pieces;
  pieces.reserve(static_cast<size_t>(rows) * 2);
  const bool k_major = major == OperandMajor::kK;
  for (int row = 0; row < rows; row += k_major ? 1 : 8)
    for (int step = 0; step < kSteps; step += k_major ? 8 : 1)
      pieces.push_back({element_address(descriptor, major, row, step), row, step});
  return pieces;
}

std::vector<uint16_t> gather_operand(const MatrixDescriptor& descriptor, OperandMajor major,
                                     int rows, std::span<const std::byte> shared) {
  std::vector<uint16_t> operand(static_cast<size_t>(rows) * kSteps);
  for (const OperandPiece& piece : operand_pieces(descriptor, major, rows)) {
    std::array<uint16_t, 8> numbers;
    if (piece.address > shared.size() || shared.size() - piece.address < sizeof numbers)
      throw std::out_of_range("an operand's row " + std::to_string(piece.row) +
                              " lies outside of shared memory, at " +
                              std::to_string(piece.address));
    std::memcpy(numbers.data(), shared.data() + piece.address, sizeof numbers);
    const size_t first = static_cast<size_t>(piece.row) * kSteps + static_cast<size_t>(piece.step);
    const size_t apart = major == OperandMajor::kK ? 1 : kSteps;
    for (size_t i = 0; i < numbers.size(); ++i) operand[first + i * apart] = numbers[i];
  }
  return operand;
}

}  // namespace tilemoe::simulator
