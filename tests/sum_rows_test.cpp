// Sums of rows of several arrays on the CPU, against float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "routing_support.h"
#include "tilemoe/rows.h"
#include "verify/registry.h"

namespace tilemoe::routing_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct Sizes {
  int32_t sources;
  int64_t source_rows, rows, P, d;
};
const Sizes kSizes[] = {{1, 1, 1, 1, 8},      {3, 5, 70, 1, 24}, {2, 40, 130, 2, 8},
                        {4, 9, 65, 3, 520},   {8, 7, 33, 8, 64}, {2, 3, 5, 64, 1032},
                        {64, 2, 129, 17, 16}, {5, 0, 6, 4, 16},  {7, 11, 0, 4, 16}};

std::vector<float> normals(int64_t count, uint32_t seed) {
  return make_logits(Logits::kNormal, count, 1, seed);
}

// Sources in separate arrays, and the rows of them that are added.
class Rows {
 public:
  Rows(const Sizes& sizes, DType dtype, uint32_t seed = 1) : sizes_(sizes), dtype_(dtype) {
    for (int32_t s = 0; s < sizes.sources; ++s)
      matrices_.emplace_back(normals(sizes.source_rows * sizes.d, seed + static_cast<uint32_t>(s)),
                             dtype, sizes.source_rows, sizes.d);
    for (Matrix& matrix : matrices_) pointers_.push_back(matrix.tensor().data);
    std::mt19937 random(seed);
    const auto all = static_cast<uint32_t>(sizes.sources * sizes.source_rows);
    const int32_t outside[] = {-1, INT32_MIN, INT32_MAX, static_cast<int32_t>(all)};
    for (int64_t i = 0; i < sizes.rows * sizes.P; ++i)
      place_.push_back(all == 0 || random() % 4 == 0 ? outside[random() % 4]
                                                     : static_cast<int32_t>(random() % all));
  }

  std::vector<int32_t>& place() { return place_; }
  Matrix& source(int32_t s) { return matrices_[static_cast<size_t>(s)]; }
  void sum(const ConstTensor& addend, const Tensor& out) {
    sum_rows({.device = Device::kCpu,
              .source = pointers_.data(),
              .sources = sizes_.sources,
              .source_rows = sizes_.source_rows,
              .place = {place_.data(), DType::kInt32, {sizes_.rows, sizes_.P}},
              .addend = addend,
              .out = out});
  }

  // The terms of an element but the addend, in order.
  std::vector<float> terms(int64_t i, int64_t column) {
    std::vector<float> found;
    for (int64_t p = 0; p < sizes_.P; ++p) {
      const int64_t place = place_[static_cast<size_t>(i * sizes_.P + p)];
      if (place < 0 || place >= sizes_.sources * sizes_.source_rows) continue;
      found.push_back(source(static_cast<int32_t>(place / sizes_.source_rows))
                          .get(place % sizes_.source_rows, column));
    }
    return found;
  }

 private:
  Sizes sizes_;
  DType dtype_;
  std::vector<Matrix> matrices_;
  std::vector<const void*> pointers_;
  std::vector<int32_t> place_;
};

double unit_of(DType dtype) {  // half the distance of neighbours at 1
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// The float32 sum in the order of the terms, rounded once, bit for bit; and within the error that
// float32 allows of the float64 sum.
void expect_sums(Rows& rows, const Sizes& sizes, DType dtype, Matrix* addend, Matrix& out) {
  for (int64_t i = 0; i < sizes.rows; ++i)
    for (int64_t j = 0; j < sizes.d; ++j) {
      std::vector<float> terms = rows.terms(i, j);
      if (addend != nullptr) terms.insert(terms.begin(), addend->get(i, j));
      double sum = 0, sizes_sum = 0;
      for (float term : terms) sum += term, sizes_sum += std::fabs(term);
      float in_order = terms.empty() ? 0.f : terms[0];
      for (size_t k = 1; k < terms.size(); ++k) in_order += terms[k];
      Matrix rounded({in_order}, dtype, 1, 1);
      const float got = out.get(i, j), want = rounded.get(0, 0);
      ASSERT_EQ(std::memcmp(&got, &want, sizeof got), 0)
          << "(" << i << ", " << j << "): " << got << ", expected " << want;
      const double allowed = static_cast<double>(terms.size()) * 0x1p-24 * sizes_sum +
                             1.01 * unit_of(dtype) * std::fabs(sum) + 0x1p-25;
      ASSERT_LE(std::fabs(got - sum), allowed) << "(" << i << ", " << j << ")";
    }
}

TEST(SumRows, EqualTheDefinition) {
  for (const Sizes& sizes : kSizes)
    for (DType dtype : kDTypes)
      for (bool with_addend : {false, true}) {
        SCOPED_TRACE(testing::Message() << sizes.sources << " sources of " << sizes.source_rows
                                        << ", P " << sizes.P << ", d " << sizes.d << ", dtype "
                                        << static_cast<int>(dtype) << ", addend " << with_addend);
        Rows rows(sizes, dtype);
        Matrix addend(normals(sizes.rows * sizes.d, 77), dtype, sizes.rows, sizes.d, 8);
        Matrix out(dtype, sizes.rows, sizes.d, 16);  // rows apart, as a block of columns has them
        rows.sum(with_addend ? addend.tensor() : Tensor(), out.tensor());
        expect_sums(rows, sizes, dtype, with_addend ? &addend : nullptr, out);
        EXPECT_TRUE(out.gaps_intact());
      }
}

TEST(SumRows, TheAddendMayBeTheOutput) {
  constexpr Sizes kSize{3, 9, 70, 4, 24};
  for (DType dtype : kDTypes) {
    Rows rows(kSize, dtype);
    const std::vector<float> before = normals(kSize.rows * kSize.d, 5);
    Matrix addend(before, dtype, kSize.rows, kSize.d), out(before, dtype, kSize.rows, kSize.d, 8);
    rows.sum(out.tensor(), out.tensor());
    expect_sums(rows, kSize, dtype, &addend, out);
    EXPECT_TRUE(out.gaps_intact());
  }
}

// One place and no addend: all bits are copied.
TEST(SumRows, ACopyKeepsEveryBit) {
  constexpr int64_t kRows = 128;  // 16-bit patterns, all of them, 512 a row
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint16_t> bits(size_t{1} << 16), out(bits.size(), 0x1234);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
    std::vector<int32_t> place(kRows);
    for (int32_t i = 0; i < kRows; ++i) place[static_cast<size_t>(i)] = kRows - 1 - i;
    const void* const source = bits.data();
    sum_rows({.device = Device::kCpu,
              .source = &source,
              .sources = 1,
              .source_rows = kRows,
              .place = {place.data(), DType::kInt32, {kRows, 1}},
              .out = {out.data(), dtype, {kRows, 512}}});
    for (size_t i = 0; i < kRows; ++i)
      ASSERT_EQ(std::memcmp(&out[i * 512], &bits[(kRows - 1 - i) * 512], 1024), 0) << "row " << i;
  }
}

// -0 stays -0 if it is the only term or if all terms are -0; NaN and infinities stay.
TEST(SumRows, TheFirstTermBeginsTheSum) {
  const float infinity = kInfinity;
  for (DType dtype : kDTypes) {
    constexpr int64_t kWidth = 8;
    Matrix source({-0.f, 0.f, 1.f, infinity, -infinity, kNaN, -0.f, 2.f}, dtype, 1, kWidth);
    const void* const pointer = source.tensor().data;
    // none, once between two that are none, twice
    std::vector<int32_t> place = {-1, -1, 7, -1, 0, 1, 0, -5, 0};
    Matrix out(dtype, 3, kWidth);
    const auto sum = [&](const ConstTensor& addend) {
      sum_rows({.device = Device::kCpu,
                .source = &pointer,
                .sources = 1,
                .source_rows = 1,
                .place = {place.data(), DType::kInt32, {3, 3}},
                .addend = addend,
                .out = out.tensor()});
    };
    sum({});
    for (int64_t j = 0; j < kWidth; ++j) {
      const float x = source.get(0, j), none = out.get(0, j), once = out.get(1, j),
                  twice = out.get(2, j);
      EXPECT_TRUE(none == 0 && !std::signbit(none));
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(once) && std::isnan(twice));
        continue;
      }
      EXPECT_EQ(bits_of({once, twice}), bits_of({x, x + x}));
    }
    Matrix addend(std::vector<float>(3 * kWidth, -0.f), dtype, 3, kWidth);
    sum(addend.tensor());
    EXPECT_TRUE(std::signbit(out.get(0, 0)));   // -0 alone
    EXPECT_TRUE(std::signbit(out.get(1, 0)));   // -0 and -0
    EXPECT_FALSE(std::signbit(out.get(1, 1)));  // -0 and 0
  }
}

TEST(SumRows, ThreadsChangeNoBit) {
  const RestoreThreads restore;
  constexpr Sizes kSize{5, 300, 1000, 6, 1032};
  for (DType dtype : kDTypes) {
    if (verify::reduced_run() && dtype != DType::kBFloat16) continue;
    std::vector<unsigned char> want;
    for (int threads : {1, 2, 3, 7}) {
      ASSERT_EQ(tilemoe_set_num_threads(threads), TILEMOE_SUCCESS);
      Rows rows(kSize, dtype);
      Matrix out(dtype, kSize.rows, kSize.d);
      rows.sum({}, out.tensor());
      if (want.empty()) want = out.bytes();
      EXPECT_EQ(out.bytes() == want, true) << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace tilemoe::routing_test
