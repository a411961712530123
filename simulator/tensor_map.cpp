#include "simulator/tensor_map.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <type_traits>

namespace tilemoe::simulator {
namespace {

template <class... Words>
void require(bool met, const Words&... words) {
  if (met) return;
  std::ostringstream message;
  message << "tensor map: ";
  (message << ... << words);
  throw std::invalid_argument(message.str());
}

// The first of CUtensorMapDataType: whole numbers, float16 to float64, bfloat16, float32 and tf32
// with and without subnormal numbers.
constexpr std::array<uint32_t, 13> kElementBytes = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
constexpr int kDataTypes = 16;  // with the packed ones

// The first of CUtensorMapSwizzle.
constexpr std::array kSwizzles = {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128};
constexpr int kSwizzleModes = 7;  // with the larger atoms

constexpr uint64_t kMaxElements = uint64_t{1} << 32;
constexpr uint64_t kStrideEnd = uint64_t{1} << 40;
constexpr uint32_t kMaxBox = 256, kMaxElementStride = 8;

bool among(int number, int count) {
  return number >= 0 && number < count;
}

// Refuses what is not simulated, even if the driver accepts it.
void require_simulated(const TensorMapArguments& given, const TensorMap& map) {
  require(given.interleave == 0, "interleaving is not simulated");
  require(given.out_of_bounds_fill == 0, "filling with NaN is not simulated");
  for (uint32_t i = 1; i < given.rank; ++i)
    require(given.element_strides[i] == 1, "strides of elements are not simulated");
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  require(map.swizzle == Swizzle::kNone || row_bytes == swizzle_span(map.swizzle),
          "a swizzled box narrower than the swizzle's span is not simulated");
}

TensorMap checked(const TensorMapArguments& given) {
  require(among(given.data_type, kDataTypes), "no data type has the number ", given.data_type);
  require(static_cast<size_t>(given.data_type) < kElementBytes.size(),
          "packed data types are not simulated");
  require(given.rank >= 1 && given.rank <= kMaxDimensions, "a rank of ", given.rank);
  require(among(given.interleave, 3) && among(given.l2_promotion, 4) &&
              among(given.out_of_bounds_fill, 2) && among(given.swizzle, kSwizzleModes),
          "an enumerator out of range");
  require(static_cast<size_t>(given.swizzle) < kSwizzles.size(),
          "swizzles of larger atoms are not simulated");
  TensorMap map{.rank = static_cast<int>(given.rank),
                .element_bytes = kElementBytes[static_cast<size_t>(given.data_type)],
                .address = given.address,
                .size = {},
                .stride_bytes = {},
                .box = {},
                .swizzle = kSwizzles[static_cast<size_t>(given.swizzle)]};
  require(map.address % 16 == 0, "address ", map.address, " is not on 16 bytes");
  for (uint32_t i = 0; i < given.rank; ++i) {
    require(given.size[i] >= 1 && given.size[i] <= kMaxElements, "size ", given.size[i],
            " of dimension ", i, " is not in [1, 2^32]");
    require(given.box[i] >= 1 && given.box[i] <= kMaxBox, "the box has ", given.box[i],
            " elements in dimension ", i, ", not 1 to 256");
    require(given.element_strides[i] >= 1 && given.element_strides[i] <= kMaxElementStride,
            "the stride of elements is ", given.element_strides[i], ", not 1 to 8");
    map.size[i] = given.size[i];
    map.box[i] = given.box[i];
  }
  for (uint32_t i = 0; i + 1 < given.rank; ++i) {
    require(given.stride_bytes[i] % 16 == 0 && given.stride_bytes[i] < kStrideEnd, "stride ",
            given.stride_bytes[i], " of dimension ", i + 1,
            " is no multiple of 16 bytes below 2^40");
    map.stride_bytes[i] = given.stride_bytes[i];
  }
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  require(row_bytes % 16 == 0, "the box's rows of ", row_bytes,
          " bytes are no multiple of 16 bytes");
  require(map.swizzle == Swizzle::kNone || row_bytes <= swizzle_span(map.swizzle),
          "the box's rows of ", row_bytes, " bytes are longer than the swizzle's span of ",
          swizzle_span(map.swizzle));
  require_simulated(given, map);
  return map;
}

// The contents of the 128 bytes.
struct Encoding {
  uint64_t mark, sum;
  TensorMap map;
};
static_assert(sizeof(Encoding) == kTensorMapBytes && std::is_trivially_copyable_v<Encoding>);
static_assert(std::has_unique_object_representations_v<TensorMap>, "no byte of it is free");

constexpr uint64_t kMark = 0x5469'6c65'4d6f'4521;

// FNV-1a, of 64-bit words.
uint64_t sum_of(const TensorMap& map) {
  std::array<uint64_t, sizeof(TensorMap) / 8> words;
  std::memcpy(words.data(), &map, sizeof map);
  uint64_t sum = 14695981039346656037u;
  for (const uint64_t word : words) sum = (sum ^ word) * 1099511628211u;
  return sum;
}

}  // namespace

uint32_t TensorMap::box_bytes() const {
  uint32_t bytes = element_bytes;
  for (int i = 0; i < rank; ++i) bytes *= box[static_cast<size_t>(i)];
  return bytes;
}

void encode_tensor_map(const TensorMapArguments& arguments, void* map) {
  require(reinterpret_cast<uintptr_t>(map) % 64 == 0, "it is itself not on 64 bytes");
  const TensorMap made = checked(arguments);
  const Encoding encoding{.mark = kMark, .sum = sum_of(made), .map = made};
  std::memcpy(map, &encoding, sizeof encoding);
}

TensorMap decode_tensor_map(const void* map) {
  Encoding encoding;
  std::memcpy(&encoding, map, sizeof encoding);
  require(encoding.mark == kMark && encoding.sum == sum_of(encoding.map),
          "its bytes are not what was encoded");
  return encoding.map;
}

std::vector<BoxPiece> box_pieces(const TensorMap& map, std::span<const int32_t> coordinates,
                                 uint32_t shared) {
  require(coordinates.size() == static_cast<size_t>(map.rank), coordinates.size(),
          " coordinates for a rank of ", map.rank);
  require(shared % 128 == 0, "shared address ", shared, " is not on 128 bytes");
  constexpr uint32_t kPieceBytes = 16;
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  const auto elements = static_cast<int64_t>(kPieceBytes / map.element_bytes);
  const auto width = static_cast<int64_t>(map.size[0]);
  std::vector<BoxPiece> pieces;
  pieces.reserve(map.box_bytes() / kPieceBytes);
  std::array<uint32_t, kMaxDimensions> at{};  // in the box; the first dimension's is not used
  for (uint32_t row = shared; row < shared + map.box_bytes(); row += row_bytes) {
    // Addresses and what is added to them are modulo 2^64.
    uint64_t global = map.address;
    bool inside = true;
    for (size_t i = 1; i < coordinates.size(); ++i) {
      const int64_t index = int64_t{coordinates[i]} + at[i];
      inside = inside && static_cast<uint64_t>(index) < map.size[i];  // a negative one is large
      global += static_cast<uint64_t>(index) * map.stride_bytes[i - 1];
    }
    for (uint32_t byte = 0; byte < row_bytes; byte += kPieceBytes) {
      const int64_t first = int64_t{coordinates[0]} + byte / map.element_bytes;
      const int64_t begin = std::clamp<int64_t>(first, 0, width),
                    end = std::clamp<int64_t>(first + elements, 0, width);
      const auto count = inside ? static_cast<uint32_t>(end - begin) : 0;
      pieces.push_back({.shared = swizzled(map.swizzle, row + byte),
                        .skipped = static_cast<uint32_t>(begin - first) * map.element_bytes,
                        .bytes = count * map.element_bytes,
                        .global = global + static_cast<uint64_t>(begin) * map.element_bytes});
      if (count == 0) pieces.back().skipped = 0;
    }
    for (size_t i = 1; i < coordinates.size(); ++i) {
      if (++at[i] < map.box[i]) break;
      at[i] = 0;
    }
  }
  return pieces;
}

}  // namespace tilemoe::simulator
