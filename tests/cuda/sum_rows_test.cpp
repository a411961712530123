// Sums of rows of several arrays on the device against the CPU's, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "cuda/compare.h"
#include "cuda/twin_routing.h"
#include "tilemoe/rows.h"

namespace tilemoe::test {
namespace {

constexpr tilemoe_dtype kDTypes[] = {TILEMOE_BFLOAT16, TILEMOE_FLOAT16};
constexpr int64_t kGap = 16;  // elements between rows of out and of the addend

enum class Addend { kNone, kGiven, kOut };
enum class Values { kNormal, kSpecial };  // -0, infinities and NaN among them

struct Sizes {
  int32_t sources;
  int64_t source_rows, rows, P, d;
};
// Each path of the kernel, with rows of few, of an odd number of and of many 16-byte chunks.
const Sizes kSizes[] = {{1, 1, 1, 1, 8},         {3, 40, 333, 1, 264},    {8, 500, 2000, 1, 2880},
                        {2, 100, 777, 2, 72},    {4, 256, 1000, 2, 4096}, {5, 33, 129, 3, 264},
                        {8, 300, 1500, 4, 2048}, {8, 300, 1500, 8, 2048}, {64, 7, 65, 11, 1032},
                        {7, 0, 9, 5, 64},        {3, 5, 70, 64, 8},       {2, 4, 0, 3, 64}};

class SumTwin {
 public:
  SumTwin(const Sizes& sizes, tilemoe_dtype dtype, Addend addend, Values values)
      : sizes_(sizes),
        which_(addend),
        place_(TILEMOE_INT32, {sizes.rows, sizes.P}),
        addend_(dtype, {sizes.rows, sizes.d + kGap}),
        out_(dtype, {sizes.rows, sizes.d + kGap}) {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    const double special[] = {-0., 0., INFINITY, -INFINITY, NAN};
    const auto number = [&](int64_t) {
      return values == Values::kSpecial && random() % 6 == 0 ? special[random() % 5]
                                                             : normal(random);
    };
    for (int32_t s = 0; s < sizes.sources; ++s)
      sources_.emplace_back(dtype, std::vector<int64_t>{sizes.source_rows, sizes.d}).fill(number);
    const int64_t all = sizes.sources * sizes.source_rows;
    const int64_t outside[] = {-1, INT32_MIN, INT32_MAX, all};
    place_.fill([&](int64_t) {
      return static_cast<double>(all == 0 || random() % 4 == 0
                                     ? outside[random() % 4]
                                     : static_cast<int64_t>(random()) % all);
    });
    addend_.fill(number), out_.fill(number);
  }

  void run(bool device) {
    std::vector<const void*> source;
    for (TwinTensor& each : sources_) source.push_back(each.on(device).data);
    const tilemoe_tensor out = rows_of(out_, device);
    sum_rows({.device = device ? Device::kCuda : Device::kCpu,
              .source = source.data(),
              .sources = sizes_.sources,
              .source_rows = sizes_.source_rows,
              .place = place_.on(device),
              .addend = which_ == Addend::kGiven ? rows_of(addend_, device)
                        : which_ == Addend::kOut ? out
                                                 : tilemoe_tensor{},
              .out = out});
    expect_cuda(cudaDeviceSynchronize(), "sum_rows");
  }
  TwinTensor& out() { return out_; }

 private:
  tilemoe_tensor rows_of(TwinTensor& tensor, bool device) const {
    tilemoe_tensor view = tensor.on(device);
    view.shape[1] = sizes_.d;
    return view;
  }

  Sizes sizes_;
  Addend which_;
  std::deque<TwinTensor> sources_;
  TwinTensor place_, addend_, out_;
};

std::string text_of(const Sizes& sizes, tilemoe_dtype dtype, Addend addend) {
  return std::to_string(sizes.sources) + " sources of " + std::to_string(sizes.source_rows) +
         ", rows " + std::to_string(sizes.rows) + ", P " + std::to_string(sizes.P) + ", d " +
         std::to_string(sizes.d) + ", " + tilemoe_dtype_name(dtype) + ", addend " +
         std::to_string(static_cast<int>(addend));
}

TEST(SumRows, HasTheBitsOfTheCpu) {
  for (const Sizes& sizes : kSizes)
    for (tilemoe_dtype dtype : kDTypes)
      for (Addend addend : {Addend::kNone, Addend::kGiven, Addend::kOut}) {
        SCOPED_TRACE(text_of(sizes, dtype, addend));
        SumTwin twin(sizes, dtype, addend, Values::kNormal);
        twin.run(true), twin.run(false);
        // gaps and guards, too
        EXPECT_TRUE(twin.out().buffer().download() == twin.out().buffer().host_bytes());
      }
}

// The same, but for the payload of NaN, which is not specified for sums.
TEST(SumRows, HasTheValuesOfTheCpuIfNoneIsFinite) {
  for (const Sizes& sizes : kSizes)
    for (tilemoe_dtype dtype : kDTypes)
      for (Addend addend : {Addend::kNone, Addend::kGiven}) {
        SCOPED_TRACE(text_of(sizes, dtype, addend));
        SumTwin twin(sizes, dtype, addend, Values::kSpecial);
        twin.run(true), twin.run(false);
        const std::vector<uint8_t> got = twin.out().buffer().download();
        expect_equal(twin.out(), got, true, 0);
        for (int64_t i = 0; i < twin.out().elements(); ++i) {
          const double is = twin.out().at(got, i);
          const double want = twin.out().at(twin.out().buffer().host_bytes(), i);
          ASSERT_TRUE(std::isnan(want) || std::signbit(is) == std::signbit(want)) << i;
        }
      }
}

// One place and no addend: every bit of every number, NaN's payload too.
TEST(SumRows, ACopyKeepsEveryBit) {
  constexpr int64_t kRows = 128, kWidth = 512;  // 16-bit patterns, all of them
  for (tilemoe_dtype dtype : kDTypes) {
    TwinTensor source(dtype, {kRows, kWidth}), out(dtype, {kRows, kWidth}),
        place(TILEMOE_INT32, {kRows, 1});
    auto* const bits = reinterpret_cast<uint16_t*>(source.buffer().host());
    for (int64_t i = 0; i < kRows * kWidth; ++i) bits[i] = static_cast<uint16_t>(i);
    source.buffer().upload();
    place.fill([](int64_t i) { return static_cast<double>(i); });
    const void* const pointer = source.device().data;
    sum_rows({.device = Device::kCuda,
              .source = &pointer,
              .sources = 1,
              .source_rows = kRows,
              .place = place.device(),
              .out = out.device()});
    expect_cuda(cudaDeviceSynchronize(), "sum_rows");
    EXPECT_TRUE(out.buffer().download() == source.buffer().host_bytes());
  }
}

TEST(SumRows, EveryRunHasTheSameBits) {
  constexpr Sizes kSize{8, 300, 1500, 8, 2048};
  SumTwin twin(kSize, TILEMOE_BFLOAT16, Addend::kGiven, Values::kNormal);
  twin.run(true);
  const std::vector<uint8_t> first = twin.out().buffer().download();
  for (int i = 0; i < 50; ++i) {
    twin.run(true);
    ASSERT_TRUE(twin.out().buffer().download() == first) << "run " << i;
  }
}

TEST(SumRows, RefusesFloat32) {
  SumTwin twin({1, 1, 4, 1, 8}, TILEMOE_FLOAT32, Addend::kNone, Values::kNormal);
  try {
    twin.run(true);
    ADD_FAILURE() << "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("float32"), std::string::npos) << error.what();
  }
}

// Half of the sources in the memory of the next GPU.
TEST(SumRows, ReadsAnotherGpu) {
  int count = 0, can = 0;
  expect_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count > 1) expect_cuda(cudaDeviceCanAccessPeer(&can, 0, 1), "cudaDeviceCanAccessPeer");
  if (!can) GTEST_SKIP() << "no GPU whose memory this one can read";
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(1, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
  constexpr int64_t kRows = 500, kWidth = 2048;
  TwinTensor source(TILEMOE_BFLOAT16, {2 * kRows, kWidth});
  TwinTensor out(TILEMOE_BFLOAT16, {kRows, kWidth}), place(TILEMOE_INT32, {kRows, 3});
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  source.fill([&](int64_t) { return normal(random); });
  place.fill([&](int64_t) { return static_cast<double>(random() % (2 * kRows)); });
  const size_t half = kRows * kWidth * sizeof(uint16_t);
  void* there = nullptr;
  expect_cuda(cudaSetDevice(1), "cudaSetDevice");
  expect_cuda(cudaMalloc(&there, half), "cudaMalloc");
  expect_cuda(cudaMemcpy(there, source.buffer().host() + half, half, cudaMemcpyHostToDevice), "");
  expect_cuda(cudaSetDevice(0), "cudaSetDevice");
  for (bool device : {true, false}) {
    const void* const sources[] = {source.on(device).data,
                                   device ? there : source.buffer().host() + half};
    sum_rows({.device = device ? Device::kCuda : Device::kCpu,
              .source = sources,
              .sources = 2,
              .source_rows = kRows,
              .place = place.on(device),
              .out = out.on(device)});
  }
  expect_cuda(cudaDeviceSynchronize(), "sum_rows");
  EXPECT_TRUE(out.buffer().download() == out.buffer().host_bytes());
  expect_cuda(cudaFree(there), "cudaFree");
}

}  // namespace
}  // namespace tilemoe::test
