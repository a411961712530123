// Stores of rows by threads: existing elements of a matrix are written to their places, and nothing
// else is. Each number identifies its place, so that lost, swapped and misplaced ones show.
// With CUDA_FORCE_PTX_JIT=1 the driver compiles the PTX for 8.0.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/core/device.h"
#include "cuda/gemm/epilogue/store_threads.h"

namespace tilemoe::cuda {
namespace {

// Two warps with two fragments each: warp w has rows [16 w, 16 w + 16) of every 32.
template <class Element_>
struct TwoWarps {
  using Element = Element_;
  static constexpr int kFragments = 2, kThreads = 2 * kWarp, BLOCK_M = 64, BLOCK_N = 128;

  __device__ static int32_t fragment_row(int index) { return fragment_row(index, threadIdx.x); }
  __device__ static int32_t fragment_row(int index, std::integral auto thread) {
    return index * 32 + static_cast<int32_t>(thread / kWarp) * fragment::kRows;
  }
};
static_assert(FragmentStore<StoreByThreads<TwoWarps<__half>, __half>>);

// Positive, exact in 8 bits of fraction, of another value in every row and column near by.
__host__ __device__ int number_at(int32_t part, int32_t row, int32_t column) {
  return 1 + (row * 37 + column * 11 + part * 101) % 251;
}

// Tiles of every part: block (x, y) has columns and rows. Numbers are given to
// the store in float32, or in 16 bits.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    store_tiles(const typename StoreByThreads<Shape, typename Shape::Element>::Output out,
                int32_t parts, int32_t first_row, int32_t row_end, bool packed) {
  using Store = StoreByThreads<Shape, typename Shape::Element>;
  constexpr int kColumns = Shape::BLOCK_N;
  const Store store(0, static_cast<int32_t>(threadIdx.x));
  const auto column = static_cast<int32_t>(blockIdx.x) * kColumns;
  const int32_t row = first_row + static_cast<int32_t>(blockIdx.y) * Shape::BLOCK_M;
  for (int32_t part = 0; part < parts; ++part) {
    AccumulatorFragments<Shape::kFragments, kColumns> D;
    uint32_t words[Shape::kFragments][kColumns / 8][2];
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        const int32_t r = row + Shape::fragment_row(m) + fragment::row(i % 4 / 2);
        D[m][i] = static_cast<float>(number_at(part, r, column + fragment::column(i / 4) + i % 2));
      }
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int w = 0; w < kColumns / 4; ++w)
        words[m][w / 2][w % 2] = pack(D[m][2 * w], D[m][2 * w + 1], typename Shape::Element());
    if (!packed) {
      store_columns<Shape, kColumns>(store, out, row, row_end, part, column,
                                     [&](int m, int i) { return D[m][i]; });
      continue;
    }
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int first = 0; first < kColumns; first += Store::kBatchColumns)
        store.store_packed(out, m, row, row_end, part, column + first, &words[m][first / 8]);
  }
  store.finish();
}

// Columns of a part; padding of a row after all parts.
struct Case {
  int32_t first_row, row_end, parts, columns, padding;
  bool packed = false;
};

std::string name_of(const Case& c) {
  return std::to_string(c.first_row) + "to" + std::to_string(c.row_end) + "_" +
         std::to_string(c.parts) + "x" + std::to_string(c.columns) + "_and" +
         std::to_string(c.padding) + (c.packed ? "_packed" : "");
}

void PrintTo(const Case& c, std::ostream* out) {
  *out << name_of(c);
}

class ThreadStores : public testing::TestWithParam<Case> {
 protected:
  // The matrix has rows before and after the stored ones, and padding: all of it is filled with a
  // number that no place has.
  template <class Element>
  static void stores_what_exists() {
    using Shape = TwoWarps<Element>;
    const Case& c = GetParam();
    constexpr int kGuardRows = 3, kUntouched = -7;
    const int32_t rows = c.row_end + Shape::BLOCK_M + kGuardRows;
    const int32_t stride = c.parts * c.columns + c.padding;
    std::vector<Element> found(static_cast<size_t>(rows) * stride,
                               Element(static_cast<float>(kUntouched)));
    const size_t bytes = found.size() * sizeof(Element);
    Element* data = nullptr;
    TILEMOE_CHECK_CUDA(cudaMalloc(&data, bytes), "a matrix");
    TILEMOE_CHECK_CUDA(cudaMemcpy(data, found.data(), bytes, cudaMemcpyHostToDevice), "a matrix");
    const tilemoe_tensor tensor{.data = data,
                                .dtype = kDTypeOf<Element>,
                                .ndim = 2,
                                .shape = {rows, c.parts * c.columns},
                                .stride = {stride, 1}};
    const dim3 tiles((c.columns + Shape::BLOCK_N - 1) / Shape::BLOCK_N,
                     (c.row_end - c.first_row + Shape::BLOCK_M - 1) / Shape::BLOCK_M);
    store_tiles<Shape><<<tiles, Shape::kThreads>>>(
        StoreByThreads<Shape, typename Shape::Element>::output(tensor, c.parts, c.columns), c.parts,
        c.first_row, c.row_end, c.packed);
    TILEMOE_CHECK_CUDA(cudaGetLastError(), "stores");
    TILEMOE_CHECK_CUDA(cudaMemcpy(found.data(), data, bytes, cudaMemcpyDeviceToHost), "a matrix");
    cudaFree(data);

    int wrong = 0;
    for (int32_t row = 0; row < rows; ++row)
      for (int32_t x = 0; x < stride; ++x) {
        const bool exists = row >= c.first_row && row < c.row_end && x < c.parts * c.columns;
        const int expected = exists ? number_at(x / c.columns, row, x % c.columns) : kUntouched;
        const auto got = static_cast<float>(found[static_cast<size_t>(row) * stride + x]);
        if (got == static_cast<float>(expected)) continue;
        if (++wrong <= 5)
          ADD_FAILURE() << "row " << row << ", element " << x << " is " << got << ", expected "
                        << expected;
      }
    EXPECT_EQ(wrong, 0);
  }
};

TEST_P(ThreadStores, WritesRowsOfBFloat16) {
  stores_what_exists<__nv_bfloat16>();
}
TEST_P(ThreadStores, WritesRowsOfFloat16) {
  stores_what_exists<__half>();
}

INSTANTIATE_TEST_SUITE_P(
    , ThreadStores,
    testing::Values(
        Case{0, 64, 1, 64, 0}, Case{0, 64, 1, 64, 0, true},
        // An end at, before and after the upper half of a fragment, in the last and in the first
        // one.
        Case{0, 1, 1, 64, 8}, Case{5, 12, 1, 64, 8}, Case{3, 11, 1, 64, 8, true},
        Case{2, 11, 1, 64, 8}, Case{7, 7 + 61, 2, 64, 8}, Case{9, 9 + 150, 1, 128, 24},
        // Groups of 8 columns, of which the last batch has one, two, three; or the last tile none.
        Case{0, 64, 1, 8, 0}, Case{0, 64, 2, 16, 8}, Case{4, 70, 2, 56, 0},
        Case{4, 70, 2, 56, 0, true}, Case{1, 40, 3, 72, 40}, Case{1, 40, 3, 104, 8, true},
        Case{1, 40, 2, 32, 0}, Case{1, 70, 2, 136, 0}, Case{1, 70, 1, 184, 8, true}),
    [](const testing::TestParamInfo<Case>& info) { return name_of(info.param); });

// In inference H is not written to a tensor.
TEST(StoreByThreadsOutput, WritesNothingThatIsNotWanted) {
  using Shape = TwoWarps<__half>;
  const auto none = StoreByThreads<Shape, typename Shape::Element>::output({}, 2, 64);
  EXPECT_EQ(none.columns, 0);
  store_tiles<Shape><<<dim3(2, 2), Shape::kThreads>>>(none, 2, 0, 128, false);
  TILEMOE_CHECK_CUDA(cudaGetLastError(), "stores");
  TILEMOE_CHECK_CUDA(cudaDeviceSynchronize(), "a store through a null pointer");
}

// No thread can write 16 bytes at once to what is not aligned to them.
TEST(StoreByThreadsOutput, RefusesWhatIsNotAligned) {
  using Store = StoreByThreads<TwoWarps<__half>, __half>;
  alignas(16) static __half memory[8];
  const tilemoe_tensor good{
      .data = memory, .dtype = TILEMOE_FLOAT16, .ndim = 2, .shape = {4, 48}, .stride = {56, 1}};
  EXPECT_EQ(Store::output(good, 2, 24).part_stride, 24);
  EXPECT_THROW(Store::output(good, 3, 20), Error);
  tilemoe_tensor bad = good;
  bad.stride[0] = 52;
  EXPECT_THROW(Store::output(bad, 2, 24), Error);
  bad.shape[0] = 1;  // nothing steps along it
  EXPECT_EQ(Store::output(bad, 2, 24).columns, 24);
  bad = good;
  bad.data = memory + 4;
  EXPECT_THROW(Store::output(bad, 2, 24), Error);
}

}  // namespace
}  // namespace tilemoe::cuda
