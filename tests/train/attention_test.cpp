// The trainer's attention: forward against plain float64 loops, backward against their differences.
#include <algorithm>
#include <numeric>

#include "gradients.h"
#include "train/operators.h"

namespace tilemoe::train {

static std::string name_of(const AttentionShape& shape) {
  return std::to_string(shape.sequences.count) + "x" + std::to_string(shape.sequences.length) +
         "h" + std::to_string(shape.heads) + "w" + std::to_string(shape.head_width);
}
void PrintTo(const AttentionShape& shape, std::ostream* out) {
  *out << name_of(shape);
}

namespace {

struct AttentionCase {
  AttentionShape shape;
  Doubles slopes;

  int64_t D() const { return shape.width(); }
  int64_t tokens() const { return shape.sequences.tokens(); }
};

Doubles attention_reference(const AttentionCase& problem, const Doubles& qkv) {
  const int64_t D = problem.D(), w = problem.shape.head_width;
  const int64_t length = problem.shape.sequences.length;
  Doubles out(at(problem.tokens() * D));
  for (int64_t t = 0; t < problem.tokens(); ++t)
    for (int64_t h = 0; h < problem.shape.heads; ++h) {
      const int64_t start = t - t % length;
      Doubles p;
      for (int64_t s = start; s <= t; ++s) {
        double product = 0;
        for (int64_t c = h * w; c < h * w + w && s > start; ++c)
          product += qkv[at(t * 3 * D + c)] * qkv[at((s - 1) * 3 * D + D + c)];
        p.push_back(std::exp(product / std::sqrt(static_cast<double>(w)) -
                             problem.slopes[at(h)] * static_cast<double>(t - s)));
      }
      const double sum = std::accumulate(p.begin(), p.end(), 0.0);
      for (int64_t s = start; s <= t; ++s)
        for (int64_t c = h * w; c < h * w + w; ++c)
          out[at(t * D + c)] += p[at(s - start)] / sum * qkv[at(s * 3 * D + 2 * D + c)];
    }
  return out;
}

class AttentionOfShape : public testing::TestWithParam<AttentionShape> {};

TEST_P(AttentionOfShape, EqualsItsDefinitionAndDerivative) {
  AttentionCase problem{GetParam(), {}};
  for (int64_t h = 0; h < problem.shape.heads; ++h)
    problem.slopes.push_back(h == 0 ? 0 : 1.0 / static_cast<double>(4 * h));
  const int64_t size = problem.tokens() * problem.D();
  Doubles qkv = random_doubles("qkv", 3 * size);
  const Doubles dout = random_doubles("dout", size);
  const FloatVec qkv_f = to_float(qkv), slopes_f = to_float(problem.slopes);
  // The rest of another, longer sequence in the scratch must have no effect.
  FloatVec scratch(at(num_threads() * attention_worker_scratch(problem.shape)), NAN);
  FloatVec out = zeros(size), log_sum = zeros(problem.tokens() * problem.shape.heads);
  cpu_operators().attention(problem.shape, slopes_f, qkv_f, out, log_sum, scratch);
  EXPECT_LE(relative_error(out, attention_reference(problem, qkv)), kFloatTolerance);

  FloatVec dqkv(at(3 * size), NAN);
  std::fill(scratch.begin(), scratch.end(), NAN);
  cpu_operators().attention_backward(problem.shape, slopes_f, qkv_f, out, log_sum, to_float(dout),
                                     dqkv, scratch);
  const Doubles want =
      central_differences(qkv, [&] { return inner(attention_reference(problem, qkv), dout); });
  EXPECT_LE(relative_error(dqkv, want), kFloatTolerance);
}

// Lengths below, at and above the blocks of queries and of vectors; one token alone.
INSTANTIATE_TEST_SUITE_P(
    , AttentionOfShape,
    testing::Values(AttentionShape{{2, 1}, 1, 16}, AttentionShape{{2, 7}, 2, 16},
                    AttentionShape{{1, 16}, 1, 32}, AttentionShape{{2, 19}, 3, 16},
                    AttentionShape{{1, 33}, 2, 16}),
    [](const testing::TestParamInfo<AttentionShape>& test) { return name_of(test.param); });

TEST(Attention, StaysFiniteWhereScoresAreLarge) {
  const AttentionShape shape{{1, 20}, 1, 16};
  FloatVec qkv(at(20 * 48), 30.f), slopes = {0.f};
  FloatVec scratch = zeros(num_threads() * attention_worker_scratch(shape));
  FloatVec out = zeros(20 * 16), log_sum = zeros(20), dqkv = zeros(20 * 48);
  cpu_operators().attention(shape, slopes, qkv, out, log_sum, scratch);
  for (const float value : out) EXPECT_NEAR(value, 30.f, 1e-4);  // every value is 30
  cpu_operators().attention_backward(shape, slopes, qkv, out, log_sum, out, dqkv, scratch);
  for (const float value : dqkv) EXPECT_TRUE(std::isfinite(value));
}

}  // namespace
}  // namespace tilemoe::train
