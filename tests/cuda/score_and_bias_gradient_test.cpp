// The gradients of scores and of biases on the device: the CPU's bits on small whole numbers, whose
// sums are exact in any order.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cuda/cuda_backend.h"
#include "cuda/device_tensors.h"
#include "cuda/step_cases.h"

namespace tilemoe::test {
namespace {

constexpr int64_t kT = 53, kSpareRows = 11;

class GradientProblem {
 public:
  explicit GradientProblem(const StepCase& c)
      : c_(c),
        E_(static_cast<int64_t>(c.counts.size())),
        M_(std::accumulate(c.counts.begin(), c.counts.end(), int64_t{0})),
        capacity_(M_ + c.spare_rows),
        width_(tilemoe_activation_gated(c.activation) != 0 ? 2 * c.n : c.n),
        offsets_(TILEMOE_INT32, {E_ + 1}),
        tokens_(TILEMOE_INT32, {capacity_}),
        scores_(TILEMOE_FLOAT32, {capacity_}),
        pair_row_(TILEMOE_INT32, {capacity_}),
        dO_(c.dtype(), {c.has(kGrouped) ? capacity_ : kT, c.d}),
        dH_(c.dtype(), {capacity_, width_}),
        b2_(c.dtype(), {E_, c.d}),
        ds_partial_(TILEMOE_FLOAT32, {ds_groups(c.n), capacity_}),
        ds_(TILEMOE_FLOAT32, {capacity_}),
        db2_(gradient(), {E_, c.d}),
        db1_(gradient(), {E_, split() ? c.n : width_}),
        db1_up_(gradient(), {E_, c.n}) {
    experts_.struct_size = sizeof experts_;
    experts_.dtype = c.dtype();
    experts_.d = c.d, experts_.n = c.n, experts_.E = E_;
    experts_.activation = c.activation;
    experts_.gate_layout = c.gate_layout();
    W1_.ndim = 3;
    W1_.stride[2] = c.has(kW1Transposed) ? width_ : 1;
    if (c.interleaved_columns()) dH_.alternate_on_device();
    fill();
  }

  void run(const Backend& backend, bool device) {
    const auto place = [&](TwinTensor& t) { return device ? t.device() : t.host(); };
    tilemoe_routing routing{};
    routing.spec.kind = c_.has(kGrouped) ? TILEMOE_ROUTING_GROUPED : TILEMOE_ROUTING_GENERAL;
    routing.spec.T = kT, routing.spec.E = E_;
    routing.spec.pairs = routing.spec.capacity = capacity_;
    routing.offsets = static_cast<int32_t*>(place(offsets_).data);
    if (!c_.has(kGrouped)) {
      routing.row_token = static_cast<int32_t*>(place(tokens_).data);
      routing.pair_row = static_cast<int32_t*>(place(pair_row_).data);
    }
    const Rows rows{
        .E = E_,
        .capacity = capacity_,
        .offsets = routing.offsets,
        .token = routing.row_token,
        .score = c_.has(kWithoutScores) ? nullptr : static_cast<const float*>(place(scores_).data)};
    backend.steps.score_gradient.run(
        {.experts = &experts_,
         .routing = &routing,
         .ds_partial = static_cast<const float*>(place(ds_partial_).data),
         .dO = place(dO_),
         .b2 = c_.has(kBiases) ? place(b2_) : tilemoe_tensor{},
         .ds = static_cast<float*>(place(ds_).data),
         .stream = nullptr});
    TwinBuffer scratch(
        backend.steps.bias_gradient.scratch_bytes(experts_, {.capacity = capacity_}));
    backend.steps.bias_gradient.run(
        {.experts = &experts_,
         .rows = rows,
         .dO = place(dO_),
         .db2 = place(db2_),
         .W1 = W1_,
         .dH = place(dH_),
         .db1 = place(db1_),
         .db1_up = split() ? place(db1_up_) : tilemoe_tensor{},
         .accumulate = c_.has(kAccumulate),
         .scratch = {device ? scratch.device() : scratch.host(),
                     scratch.host_bytes().size() - 2 * TwinBuffer::kGuard},
         .stream = nullptr});
    expect_cuda(cudaDeviceSynchronize(), c_.name.c_str());
    const std::vector<uint8_t> bytes = scratch.download();
    for (size_t i = 0; i < TwinBuffer::kGuard; ++i)
      ASSERT_EQ(bytes[bytes.size() - 1 - i], TwinBuffer::kPoison) << "written behind the scratch";
  }

  void expect_same() {
    const auto expect = [&](TwinTensor& tensor, const char* what) {
      EXPECT_TRUE(tensor.buffer().download() == tensor.buffer().host_bytes())
          << c_.name << ": " << what;
    };
    expect(ds_, "ds");
    expect(db2_, "db2");
    expect(db1_, "db1");
    expect(db1_up_, "db1_up");
  }

 private:
  tilemoe_dtype gradient() const { return c_.has(kFloatGradients) ? TILEMOE_FLOAT32 : c_.dtype(); }
  bool split() const { return c_.has(kSplit); }

  void fill() {
    verify::Random random(11, 3);
    int64_t begin = 0;
    offsets_.fill([&](int64_t e) {
      const int64_t offset = begin;
      if (e < E_) begin += c_.counts[static_cast<size_t>(e)];
      return static_cast<double>(offset);
    });
    // Rows past M name no token, and are NaN.
    tokens_.fill([&](int64_t r) { return r < M_ ? static_cast<double>(random.below(kT)) : 1e9; });
    // Every third pair has no row.
    pair_row_.fill([&](int64_t p) {
      return p % 3 == 0 || p >= M_ ? -1. : static_cast<double>((p * 7 + 5) % M_);
    });
    scores_.fill([&](int64_t r) { return r < M_ ? 0.5 * static_cast<double>(1 + r % 3) : NAN; });
    const auto whole = [&] { return static_cast<double>(random.below(5) - 2); };
    const bool grouped = c_.has(kGrouped);
    dO_.fill([&](int64_t i) { return grouped && i >= M_ * c_.d ? NAN : whole(); });
    dH_.fill([&](int64_t i) { return i >= M_ * width_ ? NAN : whole(); });
    ds_partial_.fill([&](int64_t i) { return i % capacity_ >= M_ ? NAN : whole(); });
    for (TwinTensor* tensor : {&b2_, &db2_, &db1_, &db1_up_})
      tensor->fill([&](int64_t) { return whole(); });
  }

  const StepCase c_;
  int64_t E_, M_, capacity_, width_;
  tilemoe_experts experts_{};
  tilemoe_tensor W1_{};  // a layout
  TwinTensor offsets_, tokens_, scores_, pair_row_, dO_, dH_, b2_, ds_partial_, ds_, db2_, db1_,
      db1_up_;
};

class CudaScoreAndBiasGradient : public testing::TestWithParam<StepCase> {};

TEST_P(CudaScoreAndBiasGradient, AreTheCpus) {
  GradientProblem problem(GetParam());
  problem.run(cpu_backend(), false);
  problem.run(cuda::backend(), true);
  problem.expect_same();
}

StepCase row(const char* name, const std::vector<int32_t>& counts, int64_t d, int64_t n,
             uint32_t flags, tilemoe_activation activation = TILEMOE_SWIGLU) {
  return {name, kBackward, counts, kT, d, n, kSpareRows, flags, activation};
}

const std::vector<int32_t> kShort = {300, 0, 1, 255}, kLong = {70, 0, 1, 700};
constexpr uint32_t kTo32 = kFloatGradients | kBiases;
const StepCase kCases[] = {
    row("no_rows", {0, 0, 0}, 24, 16, kTo32),
    row("no_rows_added", {0, 0, 0}, 24, 16, kBiases | kAccumulate),
    row("one_row", {0, 1, 0}, 24, 16, kTo32),
    row("ragged", {300, 0, 1, 255, 256, 257, 31, 0, 513}, 1032, 520, kTo32),
    row("float16", kShort, 136, 40, kTo32 | kFloat16),
    row("into_16_bits", kShort, 136, 40, kBiases | kFloat16),
    row("added", {70, 0, 1, 255}, 136, 40, kBiases | kAccumulate),
    row("interleaved", kLong, 136, 40, kTo32 | kInterleaved),
    row("interleaved_columns", kLong, 136, 40, kTo32 | kInterleavedColumns | kAccumulate),
    row("split", kLong, 136, 40, kTo32 | kSplit | kAccumulate),
    row("not_gated", kLong, 136, 40, kTo32, TILEMOE_RELU),
    row("grouped_without_scores", kLong, 136, 40, kTo32 | kGrouped | kWithoutScores),
    row("without_b2", kLong, 136, 328, kFloatGradients),
    row("many_experts", std::vector<int32_t>(600, 3), 16, 8, kTo32),
};

INSTANTIATE_TEST_SUITE_P(, CudaScoreAndBiasGradient, testing::ValuesIn(kCases),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace tilemoe::test
