// The fuzzer with bytes that libFuzzer looks for: preset `fuzz`, which needs clang.
#include <cstdio>
#include <cstdlib>

#include "fuzz_call.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  return tilemoe_set_num_threads(1) == TILEMOE_SUCCESS ? 0 : 1;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static tilemoe::fuzz::World world;
  try {
    tilemoe::fuzz::fuzz(world, data, size);
  } catch (const tilemoe::fuzz::Finding& finding) {
    std::fprintf(stderr, "%s\n", finding.what());
    std::abort();
  }
  return 0;
}
