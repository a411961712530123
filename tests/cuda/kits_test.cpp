// The kits that a GPU runs compute the same sums in the same order, with tensor cores that keep the
// same bits of them: all outputs of every case are equal, bit for bit. So each kit checks the other.
#include <gtest/gtest.h>

#include "layer_support.h"
#include "tilemoe/error.h"
#include "tilemoe/tilemoe.h"
#include "verify/memory.h"

namespace tilemoe::verify {
namespace {

void use_kit(const char* name) {
  ASSERT_EQ(tilemoe_set_cuda_kit(name), TILEMOE_SUCCESS) << tilemoe_last_error();
}

class KitsOfTheGpu : public testing::TestWithParam<Case> {};

TEST_P(KitsOfTheGpu, GiveTheSameBits) {
  std::vector<std::string> others;
  try {
    use_kit("sm90");
    others =
        outputs_changed_by([] { use_kit("sm80"); }, GetParam(), 1, cuda_memory(), Passes::kAll);
  } catch (const Error& error) {
    use_kit("auto");
    if (error.status() != Status::kUnsupported) throw;
    GTEST_SKIP() << "one of the two kits is not to be had here: " << error.what();
  }
  use_kit("auto");
  EXPECT_EQ(others, std::vector<std::string>())
      << "outputs of kit sm80 with other bits than sm90's";
}

std::vector<Case> cases_of_the_gpu() {
  std::vector<Case> cases = verification_cases();
  std::erase_if(cases, [](const Case& one) { return one.dtype == DType::kFloat32; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Registry, KitsOfTheGpu, testing::ValuesIn(cases_of_the_gpu()), test_name);

}  // namespace
}  // namespace tilemoe::verify
