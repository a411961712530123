// The kernel that quantises to e4m3, on a simulated GPU.
#include "quantize_fp8_support.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"

namespace tilemoe::test {
namespace {

class SimulatedQuantizeFp8 : public testing::Test {
 protected:
  void SetUp() override { machine().set_device(simulator::setting_of("sm90").device); }
  void TearDown() override {
    for (const simulator::Finding& finding : machine().take_findings())
      ADD_FAILURE() << simulator::describe(finding);
  }
  static simulator::Machine& machine() { return simulator::Machine::instance(); }
};

TEST_F(SimulatedQuantizeFp8, HasTheCodesAndScalesOfItsBlocks) {
  verify::Memory& memory = verify::cuda_memory();
  for (const int32_t block_rows : {1, 128}) {
    expect_fp8(memory, {.E = 1, .R = 0, .C = 64, .block_rows = block_rows});
    expect_fp8(memory, {.E = 2, .R = 130, .C = 264, .block_rows = block_rows, .padded = true});
    expect_fp8(memory, {.E = 1,
                        .R = 280,
                        .C = 128,
                        .block_rows = block_rows,
                        .part_rows = 140,
                        .float_scales = true});
    expect_fp8(memory,
               {.E = 1, .R = 3, .C = 8, .block_rows = block_rows, .dtype = DType::kFloat16});
    expect_fp8(memory, {.E = 2,
                        .R = 130,
                        .C = 264,
                        .block_rows = block_rows,
                        .dtype = DType::kFloat32,
                        .padded = true});
  }
}

TEST_F(SimulatedQuantizeFp8, HasBothLayouts) {
  verify::Memory& memory = verify::cuda_memory();
  for (const Fp8Case& of : {Fp8Case{.E = 2, .R = 136, .C = 264, .padded = true},
                            Fp8Case{.E = 1, .R = 280, .C = 128, .part_rows = 140},
                            Fp8Case{.E = 3, .R = 256, .C = 8, .part_rows = 128},
                            Fp8Case{.E = 2, .R = 136, .C = 136, .dtype = DType::kFloat32},
                            Fp8Case{.E = 1, .R = 8, .C = 392, .dtype = DType::kFloat16}})
    expect_both_layouts(memory, of);
}

TEST_F(SimulatedQuantizeFp8, HasBlocksOfSpecialNumbers) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (const bool float_scales : {false, true})
      expect_special_fp8(verify::cuda_memory(), dtype, float_scales);
}

TEST_F(SimulatedQuantizeFp8, StopsAtTheEndOfTheRows) {
  expect_rows_before_end(verify::cuda_memory(), backend_for(TILEMOE_CUDA));
}

}  // namespace
}  // namespace tilemoe::test
