#include "train/batches.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace tilemoe::train {
namespace {

TEST(Permutation, TakesEachNumberOnce) {
  for (const uint64_t size : {1u, 2u, 3u, 4u, 5u, 16u, 17u, 1000u}) {
    const Permutation permutation(size, 12345);
    std::set<uint64_t> taken;
    for (uint64_t i = 0; i < size; ++i) taken.insert(permutation(i));
    EXPECT_EQ(taken.size(), size);
    EXPECT_LT(*taken.rbegin(), size);
  }
}

TEST(Permutation, DependsOnItsKey) {
  const Permutation a(1000, 1), b(1000, 2);
  int same = 0, fixed = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    same += a(i) == b(i);
    fixed += a(i) == i;
  }
  EXPECT_LT(same, 20);  // 1 is expected of each
  EXPECT_LT(fixed, 20);
}

// A text in which each two bytes encode their place.
std::vector<uint8_t> numbered_text(size_t size) {
  std::vector<uint8_t> text(size);
  for (size_t i = 0; i < size; ++i)
    text[i] = static_cast<uint8_t>(i % 2 == 0 ? i / 2 % 251 : 251 + i / 502);
  return text;
}

int64_t place_of(const std::vector<uint8_t>& text, std::span<const uint8_t> part) {
  const auto found = std::search(text.begin(), text.end(), part.begin(), part.end());
  return found == text.end() ? -1 : found - text.begin();
}

TEST(Batches, APassTakesEachPlaceOnce) {
  const std::vector<uint8_t> text = numbered_text(1000);
  const Sequences sequences{2, 50};
  constexpr int64_t kPast = 3;
  const Batches batches(text, sequences, kPast, 8);
  std::vector<uint8_t> inputs(2 * 53), targets(2 * 50);
  constexpr int64_t kCuts = 19;  // of 50 bytes, wherever the first begins
  std::vector<std::set<int64_t>> places(3);
  for (int64_t step = 1; step <= 3 * kCuts / 2; ++step) {
    batches.fill((step - 1) * 2, inputs, targets);
    for (size_t b = 0; b < 2; ++b) {
      const std::span<const uint8_t> input(&inputs[b * 53 + kPast], 50),
          target(&targets[b * 50], 50);
      const int64_t place = place_of(text, input);
      ASSERT_GE(place, 0);
      EXPECT_EQ(place_of(text, target), place + 1);
      for (int64_t j = 1; j <= kPast; ++j)
        EXPECT_EQ(inputs[b * 53 + static_cast<size_t>(kPast - j)],
                  place >= j ? text[static_cast<size_t>(place - j)] : 0);
      const size_t pass = (static_cast<size_t>(step - 1) * 2 + b) / kCuts;
      EXPECT_TRUE(places[pass].insert(place).second) << "twice: " << place;
    }
  }
  for (size_t pass = 0; pass < 2; ++pass) {
    EXPECT_EQ(places[pass].size(), kCuts);
    EXPECT_EQ(*places[pass].rbegin() - *places[pass].begin(), 50 * (kCuts - 1));
  }
  EXPECT_NE(places[0], places[1]);  // cut at another offset
}

TEST(Batches, AStepNeedsNoMemoryOfTheOthers) {
  const std::vector<uint8_t> text = numbered_text(1000);
  const Batches batches(text, {2, 50}, 0, 8), others(text, {2, 50}, 0, 8);
  std::vector<uint8_t> inputs(100), targets(100), inputs_too(100), targets_too(100);
  for (int64_t step = 1; step <= 7; ++step) batches.fill((step - 1) * 2, inputs, targets);
  others.fill(6 * 2, inputs_too, targets_too);
  EXPECT_EQ(inputs, inputs_too);
  EXPECT_EQ(targets, targets_too);
}

TEST(Batches, RefuseATextThatIsTooShort) {
  const std::vector<uint8_t> text(99);
  try {
    const Batches batches(text, {1, 50}, 0, 0);
    FAIL() << "it was taken";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("--length"), std::string::npos);
  }
  const std::vector<uint8_t> enough(100);
  EXPECT_NO_THROW(Batches(enough, {1, 50}, 0, 0));
}

}  // namespace
}  // namespace tilemoe::train
