// Whether pairs of blocks multiply, as TILEMOE_PAIRS asks.
#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/two_cta.h"
#include "tilemoe/error.h"

namespace tilemoe::cuda::sm100 {
namespace {

class Pairs : public testing::Test {
 protected:
  void SetUp() override { unsetenv("TILEMOE_PAIRS"); }
  void TearDown() override { unsetenv("TILEMOE_PAIRS"); }
  static bool asked_by(const char* value) {
    setenv("TILEMOE_PAIRS", value, 1);
    return pairs_asked_for();
  }
};

TEST_F(Pairs, AreForWhoAsks) {
  EXPECT_FALSE(pairs_asked_for());
  EXPECT_FALSE(asked_by(""));
  EXPECT_FALSE(asked_by("0"));
  EXPECT_TRUE(asked_by("1"));
}

TEST_F(Pairs, AreNotAskedForByAnythingElse) {
  for (const char* value : {"yes", "2", "01", " 1"}) EXPECT_THROW(asked_by(value), Error) << value;
}

}  // namespace
}  // namespace tilemoe::cuda::sm100
