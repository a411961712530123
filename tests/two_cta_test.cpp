// 2-CTA MMAs are used if TILEMOE_2CTA requests them.
#include "cuda/two_cta.h"

#include <gtest/gtest.h>

#include "tilemoe/error.h"

namespace tilemoe::cuda::sm100 {
namespace {

TEST(TwoCta, IsUsedOnRequest) {
  EXPECT_FALSE(requests_2cta(nullptr));
  EXPECT_FALSE(requests_2cta(""));
  EXPECT_FALSE(requests_2cta("0"));
  EXPECT_TRUE(requests_2cta("1"));
}

TEST(TwoCta, IsNotRequestedByOtherValues) {
  for (const char* value : {"yes", "2", "01", " 1"})
    EXPECT_THROW(requests_2cta(value), Error) << value;
}

}  // namespace
}  // namespace tilemoe::cuda::sm100
