// What GPUs of each compute capability are asked to run.
#include <gtest/gtest.h>

#include "cuda/products.h"

namespace tilemoe::cuda {
namespace {

DeviceInfo gpu(int major, int minor) {
  return {.index = 0,
          .multiprocessors = 108,
          .major = major,
          .minor = minor,
          .l2_bytes = 40 << 20,
          .name = "Some GPU"};
}

// The text of what `check` throws; "" where it throws nothing.
template <class Check>
std::string refusal(const Check& check, const DeviceInfo& device) {
  try {
    check(device);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnsupported);
    return error.what();
  }
}

TEST(Capability, OfTheRowwiseKernelsIsAtLeast80) {
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 6}, {8, 9}, {9, 0}, {10, 0}, {12, 0}})
    EXPECT_EQ(refusal(require_any_kernel, gpu(major, minor)), "") << major << "." << minor;
  for (const auto& [major, minor] : {std::pair{7, 0}, {7, 5}, {6, 1}}) {
    const std::string said = refusal(require_any_kernel, gpu(major, minor));
    EXPECT_NE(said.find("Some GPU has compute capability " + gpu(major, minor).capability()),
              std::string::npos)
        << said;
    EXPECT_NE(said.find("needs 8.0"), std::string::npos) << said;
  }
}

TEST(Capability, OfProductsIs90Alone) {
  EXPECT_EQ(refusal(require_products, gpu(9, 0)), "");
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 9}, {9, 1}, {10, 0}, {10, 3}, {12, 0}}) {
    const std::string said = refusal(require_products, gpu(major, minor));
    EXPECT_NE(said.find("compute capability " + gpu(major, minor).capability()), std::string::npos)
        << said;
    EXPECT_NE(said.find("need 9.0"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace tilemoe::cuda
