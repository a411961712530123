// Part of every test program with the label `gpu`: without a device the program fails before its
// first test, so that no run on the wrong machine counts as passed.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tilemoe/tilemoe.h"

namespace {

class NeedDevice final : public testing::Environment {
 public:
  void SetUp() override {
    if (tilemoe_device_available(TILEMOE_CUDA)) return;
    std::fprintf(stderr, "this test needs a GPU: %s\n", tilemoe_last_error());
    std::exit(1);  // a failed assertion here would count the tests as skipped
  }
};

[[maybe_unused]] const testing::Environment* const need_device =
    testing::AddGlobalTestEnvironment(new NeedDevice);

}  // namespace
