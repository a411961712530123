// Results that are kept by their arguments: those of the last call of each place, and never another's.
#include "cuda/core/recent.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <stdexcept>

namespace tilemoe::cuda {
namespace {

constexpr size_t kPlaces = 8;
using Results = Recent<2, uint64_t, kPlaces>;

// The result has both arguments in it.
uint64_t result_of(const Results::Key& key) {
  return key[0] << 32 | key[1];
}

TEST(Recent, KeepsAResult) {
  Results results;
  int made = 0;
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(results.get({1, 2}, [&] { return ++made, result_of({1, 2}); }), result_of({1, 2}));
  EXPECT_EQ(made, 1);
}

// Arguments that differ in one number, as an address that is used again with another size.
TEST(Recent, OtherArgumentsHaveOtherResults) {
  Results results;
  for (int round = 0; round < 3; ++round)
    for (uint64_t address = 1; address < 20; ++address)
      for (uint64_t size = 0; size < 20; ++size) {
        const Results::Key key = {address, size};
        EXPECT_EQ(results.get(key, [&] { return result_of(key); }), result_of(key));
      }
}

TEST(Recent, ANewerResultTakesThePlace) {
  Results::Key first = {1, 0}, second = first;
  do ++second[1];
  while (Results::place_of(second) != Results::place_of(first));
  Results results;
  int made = 0;
  for (const Results::Key& key : {first, second, second, first})
    EXPECT_EQ(results.get(key, [&] { return ++made, result_of(key); }), result_of(key));
  EXPECT_EQ(made, 3);
}

TEST(Recent, AnErrorLeavesNoResult) {
  Results results;
  const Results::Key key = {5, 5};
  results.get(key, [] { return uint64_t{7}; });
  Results::Key other = key;
  do ++other[1];
  while (Results::place_of(other) != Results::place_of(key));
  const auto fail = []() -> uint64_t { throw std::runtime_error("no result"); };
  EXPECT_THROW(results.get(other, fail), std::runtime_error);
  for (const Results::Key& each : {other, key})
    EXPECT_EQ(results.get(each, [&] { return result_of(each); }), result_of(each));
}

TEST(Recent, UsesAllPlaces) {
  std::set<size_t> places;
  for (uint64_t i = 0; i < 16 * kPlaces; ++i) places.insert(Results::place_of({1, 256 * i}));
  EXPECT_EQ(places.size(), kPlaces);
}

}  // namespace
}  // namespace tilemoe::cuda
