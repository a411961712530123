// Quantisation to e4m3 on a GPU: the CPU's bits, also of large sizes.
#include "quantize_fp8_support.h"

namespace tilemoe::test {
namespace {

TEST(CudaQuantizeFp8, HasTheCodesAndScalesOfItsBlocks) {
  verify::Memory& memory = verify::cuda_memory();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
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
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
    for (const auto& [E, R, C, part_rows] : {std::array<int64_t, 4>{1, 8, 8, 0},
                                             {2, 1000, 2880, 0},
                                             {5, 720, 264, 360},
                                             {2, 280, 136, 140}})
      expect_fp8(verify::cuda_memory(), {.E = E,
                                         .R = R,
                                         .C = C,
                                         .block_rows = 128,
                                         .part_rows = part_rows,
                                         .dtype = dtype,
                                         .padded = true,
                                         .transposed = true});
}

}  // namespace
}  // namespace tilemoe::test
