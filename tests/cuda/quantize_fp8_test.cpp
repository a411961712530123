// Quantisation to e4m3 on a GPU: the CPU's bits, also of large sizes.
#include "quantize_fp8_support.h"

namespace tilemoe::test {
namespace {

TEST(CudaQuantizeFp8, HasTheCodesAndScalesOfItsBlocks) {
  verify::Memory& memory = verify::cuda_memory();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (const bool float_scales : {false, true})
      for (const int32_t block_rows : {1, 128}) {
        const auto with = [&](int64_t E, int64_t R, int64_t C, int64_t part_rows, bool padded) {
          return Fp8Case{E, R, C, block_rows, part_rows, float_scales, dtype, padded};
        };
        expect_fp8(memory, with(1, 0, 64, 0, false));
        expect_fp8(memory, with(1, 1000, 2880, 0, false));
        expect_fp8(memory, with(5, 720, 264, 360, true));
        expect_special_fp8(memory, dtype, float_scales);
      }
}

TEST(CudaQuantizeFp8, HasBothLayouts) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (Fp8Case of : {Fp8Case{.E = 1, .R = 8, .C = 8}, Fp8Case{.E = 2, .R = 1000, .C = 2880},
                       Fp8Case{.E = 5, .R = 720, .C = 264, .part_rows = 360},
                       Fp8Case{.E = 2, .R = 280, .C = 136, .part_rows = 140}}) {
      of.dtype = dtype, of.padded = true;
      expect_both_layouts(verify::cuda_memory(), of);
    }
}

TEST(CudaQuantizeFp8, StopsAtTheEndOfTheRows) {
  expect_rows_before_end(verify::cuda_memory(), backend_for(TILEMOE_CUDA));
}

}  // namespace
}  // namespace tilemoe::test
