#include "simulator/tensor_words.h"

#include <sstream>
#include <stdexcept>

namespace tilemoe::simulator {
namespace {

[[noreturn]] void refuse(const char* what, uint64_t bits, const char* reason) {
  std::ostringstream message;
  message << what << " 0x" << std::hex << bits << ": " << reason;
  throw std::invalid_argument(message.str());
}

// `count` bits from `first` on.
uint32_t field(uint64_t bits, int first, int count) {
  return static_cast<uint32_t>(bits >> first & ((uint64_t{1} << count) - 1));
}

}  // namespace

TensorInstruction decode_tensor_instruction(uint32_t bits, int ctas) {
  const auto require = [&](bool right, const char* reason) {
    if (!right) refuse("tcgen05 instruction descriptor", bits, reason);
  };
  require(field(bits, 0, 3) == 0, "sparse operands");
  require(field(bits, 3, 1) == 0 && field(bits, 6, 1) == 0 && field(bits, 23, 1) == 0 &&
              field(bits, 29, 1) == 0,
          "bits are set that have no meaning");
  require(field(bits, 4, 2) == 1, "sums that are not float32");
  const uint32_t a = field(bits, 7, 3), b = field(bits, 10, 3);
  require(a == b && a <= 1, "operands that are neither bfloat16 nor float16, or not the same");
  require(field(bits, 13, 2) == 0, "negated operands");
  require(field(bits, 30, 2) == 0, "a shift, which is for .ws");
  const int columns = static_cast<int>(field(bits, 17, 6)) * 8;
  const int rows = static_cast<int>(field(bits, 24, 5)) * 16;
  require(rows == 128 * ctas, "rows other than 128 per CTA");
  require(columns >= 16 && columns <= 256 && columns % (16 * ctas) == 0,
          ctas == 1 ? "columns are 16 to 256 in steps of 16"
                    : "columns of a CTA pair are 32 to 256 in steps of 32");
  const auto major = [&](int bit) {
    return field(bits, bit, 1) != 0 ? OperandMajor::kMN : OperandMajor::kK;
  };
  return {.type = a == 1 ? OperandType::kBFloat16 : OperandType::kFloat16,
          .rows = rows,
          .columns = columns,
          .a_major = major(15),
          .b_major = major(16)};
}

MatrixDescriptor decode_tensor_descriptor(uint64_t bits) {
  const auto require = [&](bool right, const char* reason) {
    if (!right) refuse("tcgen05 shared memory descriptor", bits, reason);
  };
  require(field(bits, 46, 3) == 1, "another version than Blackwell's");
  require(field(bits, 14, 2) == 0 && field(bits, 30, 2) == 0 && field(bits, 53, 8) == 0,
          "bits are set that have no meaning");
  require(field(bits, 49, 3) == 0, "it has a base offset");
  require(field(bits, 52, 1) == 0, "its leading dimension is an address");
  const uint32_t swizzle = field(bits, 61, 3);
  require(swizzle == 0 || swizzle == 2 || swizzle == 4 || swizzle == 6,
          "a swizzle that is none, or of atoms of 32 bytes");
  const auto bytes = [&](int first) { return field(bits, first, 14) << 4; };
  return {.start = bytes(0),
          .leading_offset = bytes(16),
          .stride_offset = bytes(32),
          .swizzle = swizzle == 0   ? Swizzle::kNone
                     : swizzle == 2 ? Swizzle::k128
                     : swizzle == 4 ? Swizzle::k64
                                    : Swizzle::k32};
}

}  // namespace tilemoe::simulator
