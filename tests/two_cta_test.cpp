// 2-CTA MMAs are used if TILEMOE_2CTA requests them.
#include "cuda/two_cta.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "tilemoe/error.h"

namespace tilemoe::cuda::sm100 {
namespace {

class Pairs : public testing::Test {
 protected:
  void SetUp() override { unsetenv("TILEMOE_2CTA"); }
  void TearDown() override { unsetenv("TILEMOE_2CTA"); }
  static bool requested_by(const char* value) {
    setenv("TILEMOE_2CTA", value, 1);
    return requests_2cta();
  }
};

TEST_F(Pairs, AreUsedOnRequest) {
  EXPECT_FALSE(requests_2cta());
  EXPECT_FALSE(requested_by(""));
  EXPECT_FALSE(requested_by("0"));
  EXPECT_TRUE(requested_by("1"));
}

TEST_F(Pairs, AreNotRequestedByOtherValues) {
  for (const char* value : {"yes", "2", "01", " 1"})
    EXPECT_THROW(requested_by(value), Error) << value;
}

}  // namespace
}  // namespace tilemoe::cuda::sm100
