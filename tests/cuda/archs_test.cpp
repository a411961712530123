// The archs that a GPU runs, its own and sm80, compute the same sums in the same order, with tensor
// cores that keep the same bits: all outputs of every case are equal, bit for bit. So each arch
// checks the other.
#include <gtest/gtest.h>

#include "layer_support.h"
#include "tilemoe/error.h"
#include "tilemoe/tilemoe.h"
#include "verify/memory.h"

namespace tilemoe::verify {
namespace {

void use_arch(const char* name) {
  ASSERT_EQ(tilemoe_set_cuda_arch(name), TILEMOE_SUCCESS) << tilemoe_last_error();
}

class Archs : public testing::TestWithParam<Case> {
 protected:
  void TearDown() override { use_arch("auto"); }
};

TEST_P(Archs, GiveTheSameBits) {
  std::string refused;
  for (const char* own : {"sm90", "sm100"}) {
    if (tilemoe_set_cuda_arch(own) != TILEMOE_SUCCESS) {
      refused = tilemoe_last_error();
      continue;
    }
    try {
      EXPECT_EQ(
          outputs_changed_by([] { use_arch("sm80"); }, GetParam(), 1, cuda_memory(), Passes::kAll),
          std::vector<std::string>())
          << "outputs of arch sm80 with other bits than " << own << "'s";
      return;
    } catch (const Error& error) {
      if (error.status() != Status::kUnsupported) throw;
      refused = error.what();
    }
  }
  GTEST_SKIP() << "one of the two archs is not available: " << refused;
}

std::vector<Case> cases_of_the_gpu() {
  std::vector<Case> cases = verification_cases();
  std::erase_if(cases, [](const Case& one) {
    return one.dtype == DType::kFloat32 || one.recipe != Recipe::kBf16;
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, Archs, testing::ValuesIn(cases_of_the_gpu()), test_name);

}  // namespace
}  // namespace tilemoe::verify
