// The CPU backend's GEMM: its values, and that a row's bits do not depend on where the
// row lies or on how many rows there are.
#include "cpu/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/elementwise.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"
#include "verify/registry.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kMaxRows = 40;
constexpr int64_t kAllRows = 48;  // of the GEMM that the others are compared with
constexpr float kGuard = -77.0f;

enum class Layout { kRows, kColumns };  // the contiguous dimension

std::vector<float> random_values(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  std::generate(values.begin(), values.end(), [&] { return normal(generator); });
  return values;
}

// A random matrix (rows, columns) of any type, a few elements wider than necessary.
class Random {
 public:
  Random(int64_t rows, int64_t columns, Layout layout, tilemoe_dtype dtype, unsigned seed) {
    const int64_t lines = layout == Layout::kRows ? rows : columns;
    const int64_t stride = (layout == Layout::kRows ? columns : rows) + 3;
    const std::vector<float> values = random_values(lines * stride, seed);
    bytes_.resize(values.size() * tilemoe_dtype_size(dtype));
    from_float(values.data(), bytes_.data(), dtype, 1, lines * stride, /*add=*/false);
    floats_.resize(values.size());
    to_float(bytes_.data(), dtype, 1, floats_.data(), lines * stride);
    matrix_.data = bytes_.data();
    matrix_.dtype = dtype;
    matrix_.row_stride = layout == Layout::kRows ? stride : 1;
    matrix_.column_stride = layout == Layout::kRows ? 1 : stride;
  }
  Random(const Random&) = delete;
  Random& operator=(const Random&) = delete;

  const Matrix& matrix() const { return matrix_; }
  double operator()(int64_t i, int64_t j) const {
    return floats_[static_cast<size_t>(i * matrix_.row_stride + j * matrix_.column_stride)];
  }

 private:
  std::vector<char> bytes_;
  std::vector<float> floats_;
  Matrix matrix_;
};

struct Case {
  int64_t columns, depth;
  Layout a, b;
  tilemoe_dtype dtype;
  bool add;

  std::string name() const {
    return "columns " + std::to_string(columns) + ", depth " + std::to_string(depth) + ", A " +
           (a == Layout::kRows ? "rows" : "columns") + ", B " +
           (b == Layout::kRows ? "rows" : "columns") + ", dtype " + std::to_string(dtype) +
           (add ? ", added" : "");
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t columns : {8, 40, 96, 200})
    for (const int64_t depth : {8, 24, 200, 1000})  // 1000: four parts of kDepth
      for (const Layout a : {Layout::kRows, Layout::kColumns})
        for (const Layout b : {Layout::kRows, Layout::kColumns})
          for (const tilemoe_dtype dtype : {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
            for (const bool add : {false, true}) all.push_back({columns, depth, a, b, dtype, add});
  if (verify::reduced_run())
    std::erase_if(all, [](const Case& c) {
      return c.columns == 96 || c.depth == 200 || c.dtype == TILEMOE_FLOAT16;
    });
  return all;
}

// C before the GEMM: the addend, and guards behind each row.
std::vector<float> before(const Case& c) {
  std::vector<float> C = random_values(kAllRows * (c.columns + 1), 3);
  for (int64_t i = 0; i < kAllRows; ++i)
    C[static_cast<size_t>(i * (c.columns + 1) + c.columns)] = kGuard;
  return C;
}

// Rows first .. first + rows of the GEMM; the other rows of C are unchanged.
std::vector<float> gemm(const Case& c, const Random& A, const Random& B, int64_t first,
                        int64_t rows) {
  std::vector<float> C = before(c);
  const auto needed = static_cast<size_t>(panel_floats(rows, c.columns, c.depth));
  std::vector<float> panels(needed + 1, std::numeric_limits<float>::quiet_NaN());
  panels.back() = kGuard;
  parallel_for(1, [&](int64_t, int) {
    multiply(rows, c.columns, c.depth, A.matrix().at(first, 0), B.matrix(), c.add,
             C.data() + first * (c.columns + 1), c.columns + 1, panels.data());
  });
  EXPECT_EQ(panels.back(), kGuard) << c.name() << ", rows " << rows;
  return C;
}

TEST(Gemm, ElementsAreWithinTheRoundingBound) {
  for (const Case& c : cases()) {
    const Random A(kAllRows, c.depth, c.a, c.dtype, 1), B(c.depth, c.columns, c.b, c.dtype, 2);
    const std::vector<float> start = before(c), C = gemm(c, A, B, 0, kAllRows);
    for (int64_t i = 0; i < kAllRows; ++i)
      for (int64_t j = 0; j < c.columns; ++j) {
        const auto at = static_cast<size_t>(i * (c.columns + 1) + j);
        double sum = c.add ? start[at] : 0.0, size = std::abs(sum);
        for (int64_t k = 0; k < c.depth; ++k) {
          sum += A(i, k) * B(k, j);
          size += std::abs(A(i, k) * B(k, j));
        }
        const double bound = std::ldexp(static_cast<double>(c.depth + 1), -24) * size;
        ASSERT_LE(std::abs(C[at] - sum), bound) << c.name() << ": " << i << ", " << j;
      }
  }
}

TEST(Gemm, ARowsBitsDependOnNeitherItsPlaceNorTheNumberOfRows) {
  for (const Case& c : cases()) {
    const Random A(kAllRows, c.depth, c.a, c.dtype, 1), B(c.depth, c.columns, c.b, c.dtype, 2);
    const std::vector<float> start = before(c), all = gemm(c, A, B, 0, kAllRows);
    const auto stride = static_cast<size_t>(c.columns + 1);
    // Conversions along the rows handle eight at a time.
    const int64_t step = c.dtype != TILEMOE_FLOAT32 && c.a == Layout::kColumns ? 8 : 1;
    for (int64_t rows = step; rows <= kMaxRows; rows += step)
      for (const int64_t first : {int64_t{0}, kAllRows - rows}) {
        const std::vector<float> some = gemm(c, A, B, first, rows);
        for (int64_t i = 0; i < kAllRows; ++i) {
          const bool inside = i >= first && i < first + rows;
          const float* expected = (inside ? all : start).data() + static_cast<size_t>(i) * stride;
          const float* got = some.data() + static_cast<size_t>(i) * stride;
          ASSERT_EQ(std::memcmp(got, expected, stride * sizeof(float)), 0)
              << c.name() << ": row " << i << " of " << rows << " from " << first;
        }
      }
  }
}

// Every size of a tile, with both layouts of the weights.
TEST(Gemm, ARowOfATileHasTheBitsThatItHasAlone) {
  constexpr int64_t kColumns = 40, kTerms = 304;
  for (const Layout layout : {Layout::kRows, Layout::kColumns}) {
    const Random A(kTileRows, kTerms, Layout::kRows, TILEMOE_FLOAT32, 1);
    const Random B(kTerms, kColumns, layout, TILEMOE_FLOAT32, 2);
    std::vector<float> panels(static_cast<size_t>(panel_floats(kTileRows, kColumns, kTerms)));
    const auto multiply_rows = [&](int64_t first, int64_t rows, std::vector<float>& C) {
      parallel_for(1, [&](int64_t, int) {
        multiply(rows, kColumns, kTerms, A.matrix().at(first, 0), B.matrix(), /*add=*/false,
                 C.data() + first * kColumns, kColumns, panels.data());
      });
    };
    std::vector<float> alone(static_cast<size_t>(kTileRows * kColumns)), together = alone;
    for (int64_t i = 0; i < kTileRows; ++i) multiply_rows(i, 1, alone);
    for (int64_t rows = 1; rows <= kTileRows; ++rows) {
      multiply_rows(0, rows, together);
      for (int64_t i = 0; i < rows; ++i)
        ASSERT_EQ(std::memcmp(alone.data() + i * kColumns, together.data() + i * kColumns,
                              static_cast<size_t>(kColumns) * sizeof(float)),
                  0)
            << "row " << i << " of " << rows << ", B by "
            << (layout == Layout::kRows ? "rows" : "columns");
    }
  }
}

}  // namespace
}  // namespace tilemoe::cpu
