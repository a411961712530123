// Overlap of arrays in memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/overlap.h"
#include "tilemoe/error.h"

namespace tilemoe {
namespace {

bool overlap(const tilemoe_tensor& a, const tilemoe_tensor& b) {
  MemoryUse memory;
  memory.writes("a", a);
  memory.reads("b", b);
  try {
    memory.check();
    return false;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a shares memory with b"), std::string::npos);
    return true;
  }
}

tilemoe_tensor strided(float* data, std::vector<int64_t> shape, std::vector<int64_t> stride) {
  tilemoe_tensor view{};
  view.data = data, view.dtype = TILEMOE_FLOAT32;
  view.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  std::copy(stride.begin(), stride.end(), view.stride);
  return view;
}

TEST(MemoryUse, RangesThatTouch) {
  std::vector<float> data(100);
  const auto at = [&](int64_t first, int64_t count) { return strided(&data[first], {count}, {1}); };
  EXPECT_FALSE(overlap(at(0, 10), at(10, 10)));
  EXPECT_TRUE(overlap(at(0, 11), at(10, 10)));
  EXPECT_TRUE(overlap(at(10, 10), at(0, 11)));
  EXPECT_TRUE(overlap(at(0, 100), at(50, 1)));
  EXPECT_FALSE(overlap(at(0, 0), at(0, 10)));
  EXPECT_FALSE(overlap(tilemoe_tensor{}, at(0, 10)));
}

// Views of one matrix, with its strides, that interleave.
TEST(MemoryUse, ColumnsOfOneMatrix) {
  std::vector<float> data(1000);
  const auto columns = [&](int64_t first, int64_t count) {
    return strided(&data[first], {10, count}, {100, 1});
  };
  EXPECT_FALSE(overlap(columns(0, 50), columns(50, 50)));
  EXPECT_FALSE(overlap(columns(50, 50), columns(0, 50)));
  EXPECT_TRUE(overlap(columns(0, 51), columns(50, 50)));
  EXPECT_TRUE(overlap(columns(0, 60), columns(20, 10)));
  // gate and up rows of one tensor of all experts; and rows that alternate
  EXPECT_FALSE(overlap(strided(&data[0], {5, 4, 20}, {200, 20, 1}),
                       strided(&data[80], {5, 6, 20}, {200, 20, 1})));
  EXPECT_FALSE(overlap(strided(&data[0], {5, 5, 20}, {200, 40, 1}),
                       strided(&data[20], {5, 5, 20}, {200, 40, 1})));
  EXPECT_TRUE(overlap(strided(&data[0], {5, 5, 21}, {200, 40, 1}),
                      strided(&data[20], {5, 5, 20}, {200, 40, 1})));
  // views with other strides are not analysed
  EXPECT_TRUE(overlap(columns(0, 50), strided(&data[50], {5, 50}, {200, 1})));
}

// Against every element, for small views at every distance.
TEST(MemoryUse, AgreesWithElements) {
  std::vector<float> data(200);
  int meetings = 0, pairs = 0;
  for (const int64_t rows : {1, 2, 3})
    for (const int64_t columns : {1, 2, 4})
      for (const int64_t other_rows : {1, 3})
        for (const int64_t other_columns : {1, 3, 4})
          for (const int64_t row : {4, 7})
            for (int64_t first = 0; first < 60; ++first) {
              const auto a = strided(&data[40], {rows, columns}, {row, 1});
              const auto b = strided(&data[first], {other_rows, other_columns}, {row, 1});
              std::vector<int> seen(data.size());
              const auto mark = [&](const tilemoe_tensor& view) {
                for (int64_t i = 0; i < view.shape[0]; ++i)
                  for (int64_t j = 0; j < view.shape[1]; ++j)
                    ++seen[static_cast<size_t>(static_cast<float*>(view.data) - data.data() +
                                               i * row + j)];
              };
              mark(a), mark(b);
              const bool meet = *std::max_element(seen.begin(), seen.end()) > 1;
              EXPECT_EQ(overlap(a, b), meet) << rows << " " << columns << " " << other_rows << " "
                                             << other_columns << " " << row << " " << first;
              meetings += meet, ++pairs;
            }
  EXPECT_GT(meetings, pairs / 10);
  EXPECT_LT(meetings, pairs * 9 / 10);
}

}  // namespace
}  // namespace tilemoe
