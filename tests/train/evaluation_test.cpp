#include "train/evaluation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "small_model.h"

namespace tilemoe::train {
namespace {

// A model that has learnt something, so that every byte has a loss of its own.
class EvaluationOf : public testing::Test {
 protected:
  EvaluationOf() : corpus_(small_corpus()), trainer_(small_config(), corpus_) {
    for (int step = 0; step < 12; ++step) trainer_.step();
  }

  // The loss of byte `i` of the text, seen from `start`, by a batch of one sequence.
  double loss_of(std::span<const uint8_t> text, int64_t start, int64_t i) {
    Model& model = trainer_.model();
    std::vector<uint8_t> padded(static_cast<size_t>(model.past()), 0);
    padded.push_back('\n');
    padded.insert(padded.end(), text.begin(), text.end());
    const int64_t length = i - start + 1;
    const auto inputs = ConstBytes(padded).subspan(static_cast<size_t>(start),
                                                   static_cast<size_t>(model.past() + length));
    const ConstFloats losses = model.losses(
        {1, length}, inputs, text.subspan(static_cast<size_t>(start), static_cast<size_t>(length)));
    return losses.back();
  }

  const Corpus corpus_;
  Trainer trainer_;
};

TEST_F(EvaluationOf, CountsEachByteOnceWithItsContext) {
  constexpr int64_t kLength = 20;  // of small_config
  // Windows less than full, just full, one byte more; more windows than a batch has.
  for (const int64_t size : {1, 19, 20, 21, 31, 107})
    for (const int64_t context : {0, 5, 10, 19}) {
      const auto text = std::span(corpus_.validation).first(static_cast<size_t>(size));
      const int64_t stride = kLength - context;
      double sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        const int64_t window = i < kLength ? 0 : (i - kLength) / stride + 1;
        sum += loss_of(text, window * stride, i);
      }
      EXPECT_NEAR(evaluate(trainer_.model(), text, context).loss, sum / static_cast<double>(size),
                  1e-6)
          << size << " bytes, context " << context;
    }
}

TEST_F(EvaluationOf, StopsOnRequest) {
  int calls = 0;
  evaluate(trainer_.model(), corpus_.validation, 10, [&](double) { return ++calls < 3; });
  EXPECT_EQ(calls, 3);
}

TEST(Evaluation, SaysBits) {
  EXPECT_DOUBLE_EQ((Evaluation{.loss = std::log(8.0)}.bits_per_byte()), 3);
}

}  // namespace
}  // namespace tilemoe::train
