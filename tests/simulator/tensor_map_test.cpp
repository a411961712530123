// Tensor maps: what the driver refuses, and boxes copied by them against tensors read element by
// element.
#include "simulator/tensor_map.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <stdexcept>

namespace tilemoe::simulator {
namespace {

constexpr int kFloat16 = 6, kBFloat16 = 9, kFloat32 = 7;  // CU_TENSOR_MAP_DATA_TYPE_...
constexpr int kSwizzleNone = 0, kSwizzle32 = 1, kSwizzle64 = 2, kSwizzle128 = 3;

struct alignas(64) Map {
  std::array<std::byte, kTensorMapBytes> bytes{};
};

// The arguments of a map, to be changed one by one.
struct Arguments {
  int data_type = kBFloat16;
  uint32_t rank = 3;
  uint64_t address = 0x1000;
  std::array<uint64_t, 5> size{200, 30, 7, 1, 1};
  std::array<uint64_t, 4> stride_bytes{416, 416 * 32, 16, 16};
  std::array<uint32_t, 5> box{64, 5, 2, 1, 1};
  std::array<uint32_t, 5> element_strides{1, 1, 1, 1, 1};
  int interleave = 0, swizzle = kSwizzle128, l2_promotion = 3, fill = 0;

  Map encode() const {
    Map map;
    encode_tensor_map({.data_type = data_type,
                       .rank = rank,
                       .address = address,
                       .size = size.data(),
                       .stride_bytes = stride_bytes.data(),
                       .box = box.data(),
                       .element_strides = element_strides.data(),
                       .interleave = interleave,
                       .swizzle = swizzle,
                       .l2_promotion = l2_promotion,
                       .out_of_bounds_fill = fill},
                      map.bytes.data());
    return map;
  }
  TensorMap decode() const {
    const Map map = encode();
    return decode_tensor_map(map.bytes.data());
  }
};

// The message of the error that `change` makes.
template <class Change>
std::string refusal(Change change) {
  Arguments arguments;
  change(arguments);
  try {
    arguments.decode();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "none";
}

#define EXPECT_REFUSED(change, words)                                             \
  EXPECT_NE(refusal([](Arguments& a) { change; }).find(words), std::string::npos) \
      << refusal([](Arguments& a) { change; })
#define EXPECT_TAKEN(change) EXPECT_EQ(refusal([](Arguments& a) { change; }), "none")

TEST(TensorMap, RefusesWhatTheDriverRefuses) {
  EXPECT_TAKEN((void)a);
  EXPECT_REFUSED(a.data_type = -1, "no data type");
  EXPECT_REFUSED(a.data_type = 16, "no data type");
  EXPECT_REFUSED(a.rank = 0, "a rank of 0");
  EXPECT_REFUSED(a.rank = 6, "a rank of 6");
  EXPECT_REFUSED(a.address += 8, "not on 16 bytes");
  EXPECT_REFUSED(a.size[2] = 0, "size 0 of dimension 2");
  EXPECT_REFUSED(a.size[0] = (uint64_t{1} << 32) + 1, "is not in [1, 2^32]");
  EXPECT_TAKEN(a.size[0] = uint64_t{1} << 32);
  EXPECT_REFUSED(a.stride_bytes[0] = 408, "stride 408 of dimension 1");
  EXPECT_REFUSED(a.stride_bytes[1] = uint64_t{1} << 40, "below 2^40");
  EXPECT_TAKEN(a.stride_bytes[1] = (uint64_t{1} << 40) - 16);
  EXPECT_REFUSED(a.box[1] = 0, "the box has 0");
  EXPECT_REFUSED(a.box[1] = 257, "the box has 257");
  EXPECT_TAKEN(a.box[1] = 256);
  EXPECT_REFUSED((a.box[0] = 60, a.swizzle = kSwizzleNone), "120 bytes are no multiple of 16");
  EXPECT_REFUSED(a.box[0] = 72, "144 bytes are longer than the swizzle's span of 128");
  EXPECT_REFUSED(a.swizzle = kSwizzle64, "128 bytes are longer than the swizzle's span of 64");
  EXPECT_REFUSED(a.element_strides[1] = 0, "stride of elements is 0");
  EXPECT_REFUSED(a.element_strides[2] = 9, "stride of elements is 9");
  EXPECT_REFUSED(a.swizzle = 7, "enumerator");
  EXPECT_REFUSED(a.l2_promotion = 4, "enumerator");
  EXPECT_REFUSED(a.fill = 2, "enumerator");
  EXPECT_REFUSED(a.interleave = 3, "enumerator");
}

TEST(TensorMap, NamesWhatIsNotSimulated) {
  EXPECT_REFUSED(a.data_type = 13, "not simulated");
  EXPECT_REFUSED(a.interleave = 1, "not simulated");
  EXPECT_REFUSED(a.fill = 1, "not simulated");
  EXPECT_REFUSED(a.element_strides[1] = 2, "not simulated");
  EXPECT_REFUSED(a.box[0] = 32, "not simulated");
  EXPECT_REFUSED(a.swizzle = 4, "not simulated");
}

TEST(TensorMap, MustBeAligned) {
  alignas(64) std::array<std::byte, 2 * kTensorMapBytes> bytes;
  const Arguments a;
  EXPECT_THROW(encode_tensor_map({.data_type = a.data_type,
                                  .rank = a.rank,
                                  .address = a.address,
                                  .size = a.size.data(),
                                  .stride_bytes = a.stride_bytes.data(),
                                  .box = a.box.data(),
                                  .element_strides = a.element_strides.data(),
                                  .interleave = 0,
                                  .swizzle = kSwizzle128,
                                  .l2_promotion = 0,
                                  .out_of_bounds_fill = 0},
                                 bytes.data() + 32),
               std::invalid_argument);
}

TEST(TensorMap, FindsOverwrittenMaps) {
  const Map good = Arguments().encode();
  EXPECT_EQ(decode_tensor_map(good.bytes.data()).box_bytes(), 64u * 5 * 2 * 2);
  for (size_t i = 0; i < kTensorMapBytes; ++i) {
    Map spoiled = good;
    spoiled.bytes[i] ^= std::byte{1};
    EXPECT_THROW(decode_tensor_map(spoiled.bytes.data()), std::invalid_argument) << i;
  }
  EXPECT_THROW(decode_tensor_map(Map().bytes.data()), std::invalid_argument);
}

// A tensor of three dimensions of 16-bit numbers, each of another value, with gaps between its rows
// and matrices, and boxes of it.
class Boxes : public testing::TestWithParam<int> {
 protected:
  static constexpr int kWidth = 84, kRows = 13, kMatrices = 3;  // the width is off 16 bytes
  static constexpr int kRowStride = 88, kMatrixStride = kRowStride * 15;
  static constexpr uint32_t kShared = 2048;

  alignas(16) std::array<uint16_t, kMatrixStride * kMatrices> tensor{};

  void SetUp() override {
    for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<uint16_t>(i + 1);
  }

  // Columns of a box.
  int columns() const {
    switch (GetParam()) {
      case kSwizzleNone: return 24;
      case kSwizzle32: return 16;
      case kSwizzle64: return 32;
      default: return 64;
    }
  }
  TensorMap map(uint32_t rows, uint32_t matrices) const {
    Arguments a;
    a.address = reinterpret_cast<uint64_t>(tensor.data());
    a.size = {kWidth, kRows, kMatrices, 1, 1};
    a.stride_bytes = {kRowStride * 2, kMatrixStride * 2, 16, 16};
    a.box = {static_cast<uint32_t>(columns()), rows, matrices, 1, 1};
    a.swizzle = GetParam();
    return a.decode();
  }
  static bool inside(int x, int y, int z) {
    return x >= 0 && x < kWidth && y >= 0 && y < kRows && z >= 0 && z < kMatrices;
  }
  static size_t place(int x, int y, int z) {
    return static_cast<size_t>(x + y * kRowStride + z * kMatrixStride);
  }
  // Where number `i` of row `row` of a box lies, by the figures of each mode.
  size_t shared_place(int row, int i) const {
    const int at = row * columns() * 2 + i * 2;
    const int line = at / 128, chunk = at / 16;
    switch (GetParam()) {
      case kSwizzle32: return static_cast<size_t>(at ^ (line % 2) << 4);
      case kSwizzle64: return static_cast<size_t>(at ^ (line % 4) << 4);
      case kSwizzle128:
        return static_cast<size_t>(line * 128 + (chunk % 8 ^ line % 8) * 16 + at % 16);
      default: return static_cast<size_t>(at);
    }
  }
};

constexpr std::array<std::array<int32_t, 3>, 9> kCoordinates = {{{0, 0, 0},
                                                                 {8, 2, 1},
                                                                 {-8, -3, -1},
                                                                 {72, 10, 2},
                                                                 {-3, 0, 1},
                                                                 {79, 12, 2},
                                                                 {-100, 0, 0},
                                                                 {84, 0, 0},
                                                                 {0, 13, 0}}};

TEST_P(Boxes, Load) {
  constexpr int kBoxRows = 9, kBoxMatrices = 2;
  const TensorMap of = map(kBoxRows, kBoxMatrices);
  for (const auto& at : kCoordinates) {
    const std::vector<BoxPiece> pieces = box_pieces(of, at, kShared);
    ASSERT_EQ(pieces.size() * 16, of.box_bytes());
    std::vector<std::byte> shared(kShared + of.box_bytes(), std::byte{0xff});
    for (const BoxPiece& piece : pieces) {
      std::memset(&shared[piece.shared], 0, 16);
      if (piece.bytes != 0)  // the part's address may be anything otherwise
        std::memcpy(&shared[piece.shared + piece.skipped],
                    reinterpret_cast<const void*>(piece.global), piece.bytes);
    }
    for (int row = 0; row < kBoxRows * kBoxMatrices; ++row)
      for (int i = 0; i < columns(); ++i) {
        const int x = at[0] + i, y = at[1] + row % kBoxRows, z = at[2] + row / kBoxRows;
        uint16_t got;
        std::memcpy(&got, &shared[kShared + shared_place(row, i)], sizeof got);
        ASSERT_EQ(got, inside(x, y, z) ? tensor[place(x, y, z)] : 0)
            << "x " << x << ", y " << y << ", z " << z;
      }
  }
}

TEST_P(Boxes, Store) {
  constexpr int kBoxRows = 4, kBoxMatrices = 3;
  const TensorMap of = map(kBoxRows, kBoxMatrices);
  for (const auto& at : kCoordinates) {
    SetUp();
    auto expected = tensor;
    std::vector<std::byte> shared(kShared + of.box_bytes());
    for (int row = 0; row < kBoxRows * kBoxMatrices; ++row)
      for (int i = 0; i < columns(); ++i) {
        const auto number = static_cast<uint16_t>(40000 + row * 64 + i);
        std::memcpy(&shared[kShared + shared_place(row, i)], &number, sizeof number);
        const int x = at[0] + i, y = at[1] + row % kBoxRows, z = at[2] + row / kBoxRows;
        if (inside(x, y, z)) expected[place(x, y, z)] = number;
      }
    for (const BoxPiece& piece : box_pieces(of, at, kShared))
      if (piece.bytes != 0)
        std::memcpy(reinterpret_cast<void*>(piece.global), &shared[piece.shared + piece.skipped],
                    piece.bytes);
    ASSERT_EQ(tensor, expected) << at[0] << " " << at[1] << " " << at[2];
  }
}

INSTANTIATE_TEST_SUITE_P(, Boxes,
                         testing::Values(kSwizzleNone, kSwizzle32, kSwizzle64, kSwizzle128),
                         testing::PrintToStringParamName());

TEST(BoxPieces, RefusesOtherCoordinatesAndPlaces) {
  const TensorMap map = Arguments().decode();
  const std::array<int32_t, 4> at{};
  EXPECT_NO_THROW(box_pieces(map, std::span(at).first(3), 1024));
  EXPECT_THROW(box_pieces(map, std::span(at).first(2), 1024), std::invalid_argument);
  EXPECT_THROW(box_pieces(map, at, 1024), std::invalid_argument);
  EXPECT_THROW(box_pieces(map, std::span(at).first(3), 1024 + 64), std::invalid_argument);
}

TEST(BoxPieces, OfOtherTypes) {
  Arguments a;
  a.data_type = kFloat32, a.rank = 1, a.size[0] = 10, a.box[0] = 16, a.swizzle = kSwizzleNone;
  const std::array<int32_t, 1> at{-2};
  const std::vector<BoxPiece> pieces = box_pieces(a.decode(), at, 0);
  ASSERT_EQ(pieces.size(), 4u);
  EXPECT_EQ(pieces[0].skipped, 8u);
  EXPECT_EQ(pieces[0].bytes, 8u);
  EXPECT_EQ(pieces[0].global, 0x1000u);
  EXPECT_EQ(pieces[1].global, 0x1008u);
  EXPECT_EQ(pieces[2].bytes, 16u);
  EXPECT_EQ(pieces[3].bytes, 0u);
}

// Rows [.., end) of a matrix, as core/tensor_map.h has them: the second coordinate is out of bounds
// from `end` on, and the fourth takes the rows that it adds off the address, modulo 2^64.
TEST(BoxPieces, RaggedRows) {
  constexpr int32_t kRagged = 1 << 30;
  constexpr uint64_t kWraps = uint64_t{1} << 34, kRowBytes = 416;
  Arguments a;
  a.data_type = kFloat16, a.rank = 4;
  a.size = {200, kRagged, 31, kRagged + 1, 1};
  a.stride_bytes = {kRowBytes, kRowBytes, kWraps - kRowBytes, 16};
  a.box = {64, 8, 1, 1, 1};
  const int32_t end = 19, row = 14;
  const std::array<int32_t, 4> at{64, kRagged - end + row, end, kRagged};
  const std::vector<BoxPiece> pieces = box_pieces(a.decode(), at, 0);
  ASSERT_EQ(pieces.size(), 64u);
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t box_row = i / 8;
    if (static_cast<int32_t>(box_row) + row < end) {
      EXPECT_EQ(pieces[i].bytes, 16u);
      EXPECT_EQ(pieces[i].global, 0x1000 + (row + box_row) * kRowBytes + 128 + i % 8 * 16);
    } else {
      EXPECT_EQ(pieces[i].bytes, 0u) << box_row;
    }
  }
}

}  // namespace
}  // namespace tilemoe::simulator
