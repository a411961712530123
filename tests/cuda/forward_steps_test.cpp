// The forward steps on the device against the CPU backend: equal bits on small whole numbers, close
// on unit-scale data, nothing written outside, the same bits on every run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "activation_kinds.h"
#include "backend.h"
#include "cuda/backend.h"
#include "cuda/device_tensors.h"
#include "cuda/sm90/tiles.h"
#include "cuda/step_problem.h"

namespace tilemoe::test {
namespace {

struct ForwardCase {
  std::string name;
  std::vector<int32_t> counts;  // rows of each expert
  int64_t d, n;
  int64_t spare_rows = 0;  // capacity past M
  int64_t T = 37;
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  tilemoe_activation activation = TILEMOE_REGLU;
  tilemoe_gate_layout gate_layout = TILEMOE_GATE_CONCATENATED;
  bool W1_transposed = false, W2_transposed = false;
  bool biases = false;
  bool H = true;
  bool gathered = true;
  bool integers = true;
  int32_t nan_expert = -1;
  float clamp = 0, alpha = 0, up_shift = 0;
  std::optional<cuda::TileConfiguration> tile = {};
};

void PrintTo(const ForwardCase& c, std::ostream* out) {
  *out << c.name;
}

// Inputs and outputs of the three steps. H, A and Y are inputs of nothing: each step has its own
// inputs, so that its numbers stay small and a slip in one does not hide another's.
class ForwardProblem : public StepProblem<ForwardCase> {
 public:
  explicit ForwardProblem(const ForwardCase& c)
      : StepProblem(c),
        X_(c.dtype, {c.gathered ? c.T : capacity_, c.d}),
        b1_(c.dtype, {E_, w1_rows_}),
        b1_up_(c.dtype, {E_, c.n}),
        b2_(c.dtype, {E_, c.d}),
        A_in_(c.dtype, {capacity_, c.n}),
        H_(c.dtype, {capacity_, width_}),
        A_(c.dtype, {capacity_, c.n}),
        Y_(c.dtype, {capacity_, c.d}) {
    if (adjacent()) H_.alternate_on_device();
    fill_inputs();
  }

  void run(Backend& backend, bool on_device) {
    std::vector<std::byte> scratch;
    const auto scratch_for = [&](Step step) -> Scratch {
      scratch.resize(backend.scratch_bytes(step, experts_, {.capacity = capacity_}));
      return {scratch.data(), scratch.size()};
    };
    const auto place = [&](TwinTensor& t) { return t.on(on_device); };
    const auto optional = [&](TwinTensor& t, bool there) {
      return there ? place(t) : tilemoe_tensor{};
    };
    backend.up_projection(
        {.experts = &experts_,
         .rows = rows(on_device),
         .X = place(X_),
         .weights = {place(W1_), optional(W1_up_, split_), optional(b1_, c_.biases),
                     optional(b1_up_, c_.biases && split_)},
         .H = optional(H_, c_.H),
         .A = place(A_),
         .scratch = scratch_for(Step::kUpProjection),
         .stream = nullptr,
         .tuning = tuning_of(c_)});
    backend.down_projection({.experts = &experts_,
                             .rows = rows(on_device),
                             .A = place(A_in_),
                             .W2 = place(W2_),
                             .b2 = optional(b2_, c_.biases),
                             .Y = place(Y_),
                             .scratch = scratch_for(Step::kDownProjection),
                             .stream = nullptr,
                             .tuning = tuning_of(c_)});
  }

  std::vector<NamedOutput> outputs() { return {{"H", &H_, c_.H}, {"A", &A_}, {"Y", &Y_}}; }

 private:
  void fill_inputs() {
    // Rows past M name no token: reading one would be outside X.
    tokens_.fill([&](int64_t r) {
      return r < M_ ? static_cast<double>(random_.below(std::max<int64_t>(c_.T, 1))) : 1e9;
    });
    fill(X_, 2, 1);
    if (!c_.gathered) spoil(X_, M_ * c_.d, X_.elements());
    fill_weights();
    fill(b1_, 4, 1);
    fill(b1_up_, 4, 1);
    fill(b2_, 4, 1);
    fill(A_in_, 2, 1);
    if (c_.nan_expert >= 0) spoil_expert();
  }

  // NaN in one expert's weights, and in every row past M.
  void spoil_expert() {
    for (TwinTensor* W : {&W1_, &W2_}) {
      const int64_t matrix = W->elements() / E_;
      spoil(*W, c_.nan_expert * matrix, (c_.nan_expert + 1) * matrix);
    }
    spoil(A_in_, M_ * c_.n, capacity_ * c_.n);
  }
  void spoil(TwinTensor& tensor, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      verify::store(static_cast<DType>(c_.dtype), tensor.buffer().host(), i, NAN);
    tensor.buffer().upload();
  }

  TwinTensor X_, b1_, b1_up_, b2_, A_in_, H_, A_, Y_;
};

using ForwardSteps = testing::TestWithParam<ForwardCase>;

TEST_P(ForwardSteps, EqualTheCpus) {
  ForwardProblem problem(GetParam());
  problem.run(cuda::backend(), true);
  expect_cuda(cudaDeviceSynchronize(), "the steps");
  const auto got = device_outputs(problem);
  problem.run(cpu_backend(), false);
  expect_outputs(problem, got, GetParam());
}

TEST_P(ForwardSteps, GiveTheSameBitsEveryTime) {
  ForwardProblem problem(GetParam());
  problem.run(cuda::backend(), true);
  expect_cuda(cudaDeviceSynchronize(), "the steps");
  const auto first = device_outputs(problem);
  for (int repeat = 0; repeat < 20; ++repeat) problem.run(cuda::backend(), true);
  expect_cuda(cudaDeviceSynchronize(), "the steps");
  expect_bits(problem, device_outputs(problem), first);
}

std::vector<ForwardCase> cases() {
  const std::vector<int32_t> ragged = {129, 0, 1, 64, 300, 127, 0, 128};
  std::vector<ForwardCase> all = {
      {.name = "any_tile", .counts = ragged, .d = 256, .n = 192, .spare_rows = 77},
      {.name = "odd_widths", .counts = ragged, .d = 200, .n = 72, .spare_rows = 5},
      {.name = "tiny", .counts = {1}, .d = 8, .n = 8, .T = 1},
      {.name = "one_expert_has_all", .counts = {0, 0, 700, 0}, .d = 136, .n = 264},
      {.name = "no_row", .counts = {0, 0, 0}, .d = 64, .n = 64, .spare_rows = 40},
      {.name = "grouped",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .spare_rows = 130,
       .gathered = false},
      {.name = "interleaved",
       .counts = ragged,
       .d = 256,
       .n = 136,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .biases = true},
      {.name = "split",
       .counts = ragged,
       .d = 256,
       .n = 136,
       .gate_layout = TILEMOE_GATE_SPLIT,
       .biases = true},
      {.name = "biases", .counts = ragged, .d = 256, .n = 136, .biases = true},
      {.name = "transposed",
       .counts = ragged,
       .d = 200,
       .n = 136,
       .W1_transposed = true,
       .W2_transposed = true},
      {.name = "transposed_split",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .gate_layout = TILEMOE_GATE_SPLIT,
       .W1_transposed = true,
       .W2_transposed = true},
      {.name = "adjacent",
       .counts = ragged,
       .d = 200,
       .n = 136,
       .spare_rows = 77,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .W2_transposed = true,
       .biases = true},
      {.name = "adjacent_tiny",
       .counts = {1},
       .d = 8,
       .n = 8,
       .T = 1,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true},
      {.name = "adjacent_grouped",
       .counts = ragged,
       .d = 264,
       .n = 328,
       .spare_rows = 9,
       .dtype = TILEMOE_FLOAT16,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .gathered = false},
      {.name = "adjacent_inference",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .H = false},
      {.name = "adjacent_nan_expert",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .spare_rows = 90,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .nan_expert = 4},
      {.name = "adjacent_many_tiles",
       .counts = {2000, 1500, 33, 1025, 900},
       .d = 1032,
       .n = 520,
       .T = 1000,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true},
      {.name = "float16", .counts = ragged, .d = 256, .n = 192, .dtype = TILEMOE_FLOAT16},
      {.name = "float16_transposed",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .dtype = TILEMOE_FLOAT16,
       .W1_transposed = true,
       .W2_transposed = true},
      {.name = "identity",
       .counts = ragged,
       .d = 256,
       .n = 328,
       .activation = TILEMOE_IDENTITY,
       .biases = true},
      {.name = "identity_transposed",
       .counts = ragged,
       .d = 256,
       .n = 328,
       .activation = TILEMOE_IDENTITY,
       .W1_transposed = true,
       .W2_transposed = true},
      {.name = "relu_squared",
       .counts = ragged,
       .d = 64,
       .n = 328,
       .activation = TILEMOE_RELU_SQUARED},
      {.name = "inference", .counts = ragged, .d = 256, .n = 192, .H = false},
      {.name = "nan_expert",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .spare_rows = 90,
       .nan_expert = 4},
      {.name = "many_experts",
       .counts = std::vector<int32_t>(300, 7),
       .d = 72,
       .n = 40,
       .spare_rows = 200},
      {.name = "many_tiles", .counts = {2000, 1500, 33, 1025, 900}, .d = 1032, .n = 520, .T = 1000},
  };
  for (const auto& [name, tile] :
       {std::pair("cooperative256", cuda::kCooperative256),
        std::pair("pairs256", cuda::kCluster256), std::pair("pairs192", cuda::kCluster192),
        std::pair("pingpong128", cuda::kPingPong128), std::pair("pingpong64", cuda::kPingPong64)}) {
    const std::string suffix = std::string("_") + name;
    ForwardCase swiglu{.name = "swiglu" + suffix,
                       .counts = ragged,
                       .d = 512,
                       .n = 328,
                       .spare_rows = 77,
                       .activation = TILEMOE_SWIGLU,
                       .integers = false,
                       .tile = tile};
    all.push_back(swiglu);
    swiglu.name = "swiglu_biases" + suffix, swiglu.biases = true;
    all.push_back(swiglu);
    swiglu.name = "swiglu_grouped" + suffix, swiglu.gathered = false;
    all.push_back(swiglu);
    swiglu.gathered = true;
    swiglu.name = "swiglu_inference" + suffix, swiglu.H = false;
    all.push_back(swiglu);
    swiglu.H = true;
    swiglu.name = "swiglu_many_tiles" + suffix;
    swiglu.counts = {2000, 1500, 33, 1025, 900}, swiglu.d = 1032, swiglu.n = 520, swiglu.T = 1000;
    all.push_back(swiglu);
    all.push_back({.name = "down" + suffix,
                   .counts = {2000, 1500, 33, 1025, 900},
                   .d = 1032,
                   .n = 520,
                   .T = 1000,
                   .tile = tile});
  }
  for (tilemoe_activation activation : kActivations)
    all.push_back({.name = std::string(tilemoe_activation_name(activation)) + "_float16",
                   .counts = ragged,
                   .d = 256,
                   .n = 192,
                   .dtype = TILEMOE_FLOAT16,
                   .activation = activation,
                   .integers = false});
  ForwardCase gpt_oss{.name = "clamped_swiglu",
                      .counts = ragged,
                      .d = 256,
                      .n = 192,
                      .activation = TILEMOE_SWIGLU,
                      .biases = true,
                      .integers = false,
                      .clamp = 1.5f,
                      .alpha = 1.702f,
                      .up_shift = 1.f};
  all.push_back(gpt_oss);
  gpt_oss.gate_layout = TILEMOE_GATE_INTERLEAVED;
  gpt_oss.W1_transposed = gpt_oss.W2_transposed = true;
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16}) {
    gpt_oss.name = std::string("gpt_oss") + (dtype == TILEMOE_FLOAT16 ? "_float16" : "");
    gpt_oss.dtype = dtype;
    all.push_back(gpt_oss);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cuda, ForwardSteps, testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

// Each token's rows, with and without addend; pairs that have no row are left out.
TEST(Combine, SumsInTheOrderOfPairs) {
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
    for (const int64_t K : {1, 3, 8, 11}) {
      SCOPED_TRACE(K);
      const int64_t T = 101, d = 264, E = 16, capacity = T * K;
      tilemoe_experts experts{};
      experts.struct_size = sizeof experts;
      experts.dtype = dtype;
      experts.d = d, experts.n = 8, experts.E = E;
      TwinTensor Y(dtype, {capacity, d}), addend(dtype, {T, d}), O(dtype, {T, d});
      TwinTensor pair_row(TILEMOE_INT32, {T * K}), score(TILEMOE_FLOAT32, {capacity});
      TwinTensor offsets(TILEMOE_INT32, {E + 1});
      verify::Random random(3, 2);
      for (TwinTensor* t : {&Y, &addend})
        t->fill([&](int64_t) { return static_cast<double>(random.below(9)) - 4; });
      score.fill([&](int64_t) { return static_cast<double>(random.below(8)) / 4; });
      pair_row.fill([&](int64_t i) {
        return i % 5 == 3 ? -1.0 : static_cast<double>(random.below(capacity));
      });
      offsets.fill([&](int64_t e) { return static_cast<double>(e * capacity / E); });
      for (const bool adds : {false, true}) {
        const auto combine = [&](Backend& backend, bool on_device) {
          const auto place = [&](TwinTensor& t) { return on_device ? t.device() : t.host(); };
          tilemoe_routing routing{};
          routing.spec.kind = TILEMOE_ROUTING_TOP_K;
          routing.spec.T = T, routing.spec.E = E, routing.spec.K = K;
          routing.spec.pairs = routing.spec.capacity = capacity;
          routing.offsets = static_cast<int32_t*>(place(offsets).data);
          routing.pair_row = static_cast<int32_t*>(place(pair_row).data);
          routing.row_score = static_cast<float*>(place(score).data);
          backend.combine({.experts = &experts,
                           .routing = &routing,
                           .row_values = place(Y),
                           .scale_by_score = true,
                           .addend = adds ? place(addend) : tilemoe_tensor{},
                           .out = place(O),
                           .stream = nullptr});
        };
        combine(cuda::backend(), true);
        expect_cuda(cudaDeviceSynchronize(), "combine");
        combine(cpu_backend(), false);
        EXPECT_EQ(O.buffer().download(), O.buffer().host_bytes());
      }
    }
}

}  // namespace
}  // namespace tilemoe::test
