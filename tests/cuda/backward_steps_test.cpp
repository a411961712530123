// The backward steps on the device against the CPU backend: equal on small whole numbers, close on
// unit-scale data, nothing written outside, the same bits on every run. Every dense row past M is
// NaN, and so are, where a case asks, all rows of one expert and the tokens that only it has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "activation_kinds.h"
#include "backend.h"
#include "cuda/backend.h"
#include "cuda/core/device.h"
#include "cuda/device_tensors.h"
#include "cuda/products.h"
#include "cuda/schedule/weight_gradient_shares.h"
#include "cuda/sm90/tiles.h"
#include "cuda/step_problem.h"

namespace tilemoe::test {
namespace {

struct BackwardCase {
  std::string name;
  std::vector<int32_t> counts;  // rows of each expert
  int64_t d, n;
  int64_t spare_rows = 0;  // capacity past M
  int64_t T = 37;
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  tilemoe_activation activation = TILEMOE_REGLU;
  tilemoe_gate_layout gate_layout = TILEMOE_GATE_CONCATENATED;
  bool W1_transposed = false, W2_transposed = false;
  bool gathered = true;
  bool integers = true;
  int32_t nan_expert = -1;
  float clamp = 0, alpha = 0, up_shift = 0;
  bool float_gradients = false;
  bool accumulate = false;
  bool dH_over_H = false;
  bool scores = true;
  bool wants_dH = true, wants_A_scaled = true, wants_ds = true;
  std::optional<cuda::TileConfiguration> tile = {};  // the one chosen, where none is told
};

void PrintTo(const BackwardCase& c, std::ostream* out) {
  *out << c.name;
}

// How the products are launched.
struct Launch {
  int block_turns = 1;
  int32_t workers = 0;

  template <class Case>
  Tuning tuning(const Case& c) const {
    Tuning tuning = tuning_of(c);
    tuning.block_turns = block_turns;
    return tuning;
  }
};

// Inputs and outputs of the steps. dH and A' that are read are not those that are written: each
// step has its own inputs, so that its numbers stay small and a slip in one hides no other's.
class BackwardProblem : public StepProblem<BackwardCase> {
 public:
  explicit BackwardProblem(const BackwardCase& c)
      : StepProblem(c),
        X_(c.dtype, {source_rows(), c.d}),
        dO_(c.dtype, {source_rows(), c.d}),
        H_(c.dtype, {capacity_, width_}),
        scores_(TILEMOE_FLOAT32, {capacity_}),
        dH_in_(c.dtype, {capacity_, width_}),
        A_scaled_in_(c.dtype, {capacity_, c.n}),
        dH_(c.dtype, {capacity_, width_}),
        A_scaled_(c.dtype, {capacity_, c.n}),
        ds_partial_(TILEMOE_FLOAT32, {ds_groups(c.n) + 1, capacity_}),
        dX_rows_(c.dtype, {capacity_, c.d}),
        dW1_(gradient_dtype(), {E_, w1_rows_, c.d}, c.W1_transposed),
        dW1_up_(gradient_dtype(), {E_, c.n, c.d}, c.W1_transposed),
        dW2_(gradient_dtype(), {E_, c.d, c.n}, c.W2_transposed) {
    if (adjacent())
      for (TwinTensor* t : {&H_, &dH_in_, &dH_}) t->alternate_on_device();
    fill_inputs();
  }

  void run(Backend& backend, bool on_device, const Launch& launch = {}) {
    std::list<TwinBuffer> scratches;
    const auto scratch_for = [&](Step step) -> Scratch {
      const size_t bytes =
          backend.scratch_bytes(step, experts_, {.capacity = capacity_, .workers = launch.workers});
      TwinBuffer& scratch = scratches.emplace_back(bytes);
      return {on_device ? scratch.device() : scratch.host(), bytes};
    };
    const auto place = [&](TwinTensor& t) { return t.on(on_device); };
    const auto up = [&](TwinTensor& t) { return split_ ? place(t) : tilemoe_tensor{}; };
    Rows rows = StepProblem::rows(on_device);
    if (c_.scores) rows.score = static_cast<const float*>(place(scores_).data);
    const auto optional = [&](TwinTensor& t, bool there) {
      return there ? place(t) : tilemoe_tensor{};
    };
    backend.activation_gradient(
        {.experts = &experts_,
         .rows = rows,
         .dO = place(dO_),
         .W1 = place(W1_),
         .W2 = place(W2_),
         .H = place(H_),
         .dH = optional(c_.dH_over_H ? H_ : dH_, c_.wants_dH),
         .A_scaled = optional(A_scaled_, c_.wants_A_scaled),
         .ds_partial = c_.wants_ds ? static_cast<float*>(place(ds_partial_).data) : nullptr,
         .scratch = scratch_for(Step::kActivationGradient),
         .stream = nullptr,
         .tuning = launch.tuning(c_)});
    backend.weight_gradient_2({.experts = &experts_,
                               .rows = rows,
                               .dO = place(dO_),
                               .A_scaled = place(A_scaled_in_),
                               .dW2 = place(dW2_),
                               .accumulate = c_.accumulate,
                               .scratch = scratch_for(Step::kWeightGradient2),
                               .stream = nullptr,
                               .tuning = launch.tuning(c_),
                               .workers = launch.workers});
    backend.input_gradient({.experts = &experts_,
                            .rows = rows,
                            .dH = place(dH_in_),
                            .weights = {place(W1_), up(W1_up_), {}, {}},
                            .dX_rows = place(dX_rows_),
                            .scratch = scratch_for(Step::kInputGradient),
                            .stream = nullptr,
                            .tuning = launch.tuning(c_)});
    backend.weight_gradient_1({.experts = &experts_,
                               .rows = rows,
                               .W1 = place(W1_),
                               .dH = place(dH_in_),
                               .X = place(X_),
                               .dW1 = place(dW1_),
                               .dW1_up = up(dW1_up_),
                               .accumulate = c_.accumulate,
                               .scratch = scratch_for(Step::kWeightGradient1),
                               .stream = nullptr,
                               .tuning = launch.tuning(c_),
                               .workers = launch.workers});
    if (!on_device) return;
    expect_cuda(cudaDeviceSynchronize(), "the steps");
    for (const TwinBuffer& scratch : scratches) EXPECT_TRUE(scratch.guards_intact());
  }

  std::vector<NamedOutput> outputs() {
    std::vector<NamedOutput> all = {{"dW2", &dW2_}, {"dX~", &dX_rows_}, {"dW1", &dW1_}};
    if (split_) all.push_back({"dW1_up", &dW1_up_});
    if (c_.wants_dH) all.push_back({"dH", c_.dH_over_H ? &H_ : &dH_});
    if (c_.wants_A_scaled) all.push_back({"A'", &A_scaled_});
    return all;
  }
  // That the work on long experts is cut into, at most, in either weight gradient.
  int32_t fewest_shares(int32_t workers) const {
    const ScratchSizes sizes{.capacity = capacity_, .workers = workers};
    const int multiprocessors = cuda::current_device().multiprocessors;
    return std::min(
        cuda::weight_gradient_shares(Step::kWeightGradient1, experts_, sizes, multiprocessors),
        cuda::weight_gradient_shares(Step::kWeightGradient2, experts_, sizes, multiprocessors));
  }
  TwinTensor& ds_partial() { return ds_partial_; }
  // The partial sums of the rows that exist, group by group.
  std::vector<double> ds(const std::vector<uint8_t>& partial) const {
    std::vector<double> sums;
    for (int64_t group = 0; group < ds_groups(c_.n); ++group)
      for (int64_t r = 0; r < M_; ++r)
        sums.push_back(ds_partial_.at(partial, group * capacity_ + r));
    return sums;
  }
  // Place of the first partial sum that was written though its row does not exist, or though it was
  // not asked for; -1 where there is none.
  int64_t stray_sum(const std::vector<uint8_t>& partial) const {
    const auto* sums = partial.data() + TwinBuffer::kGuard;
    for (int64_t place = 0; place < ds_partial_.elements(); ++place) {
      const bool wanted =
          c_.wants_ds && place / capacity_ < ds_groups(c_.n) && place % capacity_ < M_;
      const auto* sum = sums + place * static_cast<int64_t>(sizeof(float));
      if (!wanted && std::any_of(sum, sum + sizeof(float),
                                 [](uint8_t byte) { return byte != TwinBuffer::kPoison; }))
        return place;
    }
    return -1;
  }

 private:
  static constexpr int64_t kOwnTokens = 4;  // of the expert whose rows are NaN

  int64_t source_rows() const { return c_.gathered ? c_.T + kOwnTokens : capacity_; }
  tilemoe_dtype gradient_dtype() const { return c_.float_gradients ? TILEMOE_FLOAT32 : c_.dtype; }

  void fill_inputs() {
    const bool spoils = c_.nan_expert >= 0;
    const int64_t nan_begin = spoils ? row_begin(c_.nan_expert) : 0;
    const int64_t nan_end = spoils ? row_begin(c_.nan_expert + 1) : 0;
    const auto spoilt = [&](int64_t row) { return row >= nan_begin && row < nan_end; };
    // Rows past M name no token: reading one would be outside X.
    tokens_.fill([&](int64_t r) {
      if (r >= M_) return 1e9;
      return spoilt(r) ? static_cast<double>(c_.T + random_.below(kOwnTokens))
                       : static_cast<double>(random_.below(c_.T));
    });
    for (TwinTensor* source : {&X_, &dO_})
      source->fill([&](int64_t i) {
        const int64_t row = i / c_.d;
        const bool nan = c_.gathered ? row >= c_.T : row >= M_ || spoilt(row);
        return nan ? NAN : number(2, 1);
      });
    scores_.fill(
        [&](int64_t r) { return r < M_ ? 0.5 * static_cast<double>(1 + random_.below(4)) : NAN; });
    for (TwinTensor* rows : {&H_, &dH_in_, &A_scaled_in_})
      rows->fill([&](int64_t i) {
        const int64_t row = i / rows->host().shape[1];
        return row >= M_ || spoilt(row) ? NAN : number(2, 1);
      });
    fill_weights();
    if (c_.accumulate)
      for (TwinTensor* dW : {&dW1_, &dW1_up_, &dW2_}) fill(*dW, 8, 1);
  }

  TwinTensor X_, dO_, H_, scores_, dH_in_, A_scaled_in_;
  TwinTensor dH_, A_scaled_, ds_partial_, dX_rows_, dW1_, dW1_up_, dW2_;
};

using BackwardSteps = testing::TestWithParam<BackwardCase>;

std::vector<std::vector<uint8_t>> run_on_device(BackwardProblem& problem,
                                                const Launch& launch = {}) {
  for (const auto& output : problem.outputs()) output.tensor->buffer().upload();
  problem.run(cuda::backend(), true, launch);
  return device_outputs(problem);
}

TEST_P(BackwardSteps, EqualTheCpus) {
  const BackwardCase& c = GetParam();
  BackwardProblem problem(c);
  const auto got = run_on_device(problem);
  const auto ds_partial = problem.ds_partial().buffer().download();
  const auto ds = problem.ds(ds_partial);
  problem.run(cpu_backend(), false);
  expect_outputs(problem, got, c);
  EXPECT_EQ(problem.stray_sum(ds_partial), -1);
  if (!c.wants_ds) return;
  const auto expected = problem.ds(problem.ds_partial().buffer().host_bytes());
  double error = 0, norm = 0;
  for (size_t r = 0; r < ds.size(); ++r) {
    const bool equal = ds[r] == expected[r] || (std::isnan(ds[r]) && std::isnan(expected[r]));
    EXPECT_TRUE(equal || !c.integers)
        << "partial sum " << r << " of ds: " << ds[r] << ", expected " << expected[r];
    error += (ds[r] - expected[r]) * (ds[r] - expected[r]);
    norm += expected[r] * expected[r];
  }
  if (!c.integers) {
    EXPECT_LT(std::sqrt(error / norm), 1e-5);
  }
}

TEST_P(BackwardSteps, GiveTheSameBitsEveryTime) {
  BackwardProblem problem(GetParam());
  const auto first = run_on_device(problem);
  for (int repeat = 0; repeat < 4; ++repeat) expect_bits(problem, run_on_device(problem), first);
}

// Experts so long that they are cut, in more tiles than there are multiprocessors.
BackwardCase long_experts_case(tilemoe_dtype dtype, bool integers) {
  return {.name = "cut",
          .counts = {1900, 64, 2500, 3, 1700},
          .d = 1032,
          .n = 520,
          .spare_rows = 90,
          .dtype = dtype,
          .integers = integers,
          .float_gradients = true};
}

// The number of workers says where sums are cut, and so the bits; how many clusters there are to do
// the work does not. Asked for are shares for some of the clusters and several for each.
TEST(CutSums, DependOnTheWorkersAndNotOnTheClusters) {
  const BackwardCase c = long_experts_case(TILEMOE_BFLOAT16, /*integers=*/false);
  BackwardProblem problem(c);
  const int32_t clusters = cuda::current_device().multiprocessors / 2;
  std::vector<std::vector<std::vector<uint8_t>>> by_workers;
  for (const int32_t workers : {1, clusters / 4, clusters, 2 * clusters, 1000}) {
    SCOPED_TRACE(workers);
    if (workers == 1000) {
      ASSERT_GT(problem.fewest_shares(workers), 2 * clusters);
    }
    const auto first = run_on_device(problem, {.block_turns = 1, .workers = workers});
    for (const int turns : {1, 2, 3})
      expect_bits(problem, run_on_device(problem, {.block_turns = turns, .workers = workers}),
                  first);
    by_workers.push_back(first);
  }
  expect_bits(problem, run_on_device(problem), by_workers[2]);  // the device's own
  for (size_t i = 0; i < by_workers.size(); ++i)
    for (size_t j = 0; j < i; ++j) EXPECT_NE(by_workers[i], by_workers[j]) << i << ", " << j;
  problem.run(cpu_backend(), false);
  for (const auto& got : by_workers) expect_outputs(problem, got, c);
}

TEST(CutSums, AreExactWhereWholeNumbersAre) {
  for (const auto dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16}) {
    const BackwardCase c = long_experts_case(dtype, /*integers=*/true);
    BackwardProblem problem(c);
    problem.run(cpu_backend(), false);
    for (const int32_t workers : {1, 2, 7, 50, 1000})
      expect_outputs(problem, run_on_device(problem, {.block_turns = 1, .workers = workers}), c);
  }
}

std::vector<BackwardCase> cases() {
  const std::vector<int32_t> ragged = {129, 0, 1, 64, 300, 127, 0, 128};
  const std::vector<int32_t> long_experts = {70, 1301, 0, 2000};
  std::vector<BackwardCase> all = {
      {.name = "ragged", .counts = ragged, .d = 256, .n = 192, .spare_rows = 77},
      {.name = "odd_widths", .counts = ragged, .d = 200, .n = 72, .spare_rows = 5},
      {.name = "tiny", .counts = {1}, .d = 8, .n = 8, .T = 1},
      {.name = "one_expert_has_all", .counts = {0, 0, 700, 0}, .d = 136, .n = 264},
      {.name = "no_row", .counts = {0, 0, 0}, .d = 64, .n = 64, .spare_rows = 40},
      {.name = "grouped",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .spare_rows = 33,
       .gathered = false},
      {.name = "nan_expert",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .spare_rows = 90,
       .nan_expert = 4},
      {.name = "nan_expert_grouped",
       .counts = ragged,
       .d = 72,
       .n = 40,
       .spare_rows = 90,
       .gathered = false,
       .nan_expert = 2},
      {.name = "nan_expert_long",
       .counts = {1500, 64, 2100, 3, 1400},
       .d = 264,
       .n = 136,
       .spare_rows = 90,
       .nan_expert = 2},
      {.name = "long_expert_alone", .counts = {4097}, .d = 264, .n = 520, .spare_rows = 30},
      {.name = "long_expert_among_many",
       .counts =
           [] {
             std::vector<int32_t> counts(700, 3);
             counts[77] = 3000, counts[699] = 1100, counts[300] = 0;
             return counts;
           }(),
       .d = 40,
       .n = 72},
      {.name = "many_experts",
       .counts = std::vector<int32_t>(300, 7),
       .d = 72,
       .n = 40,
       .spare_rows = 200},
      {.name = "many_tiles", .counts = {2000, 1500, 33, 1025, 900}, .d = 1032, .n = 520, .T = 1000},
      {.name = "dH_over_H",
       .counts = ragged,
       .d = 200,
       .n = 328,
       .spare_rows = 20,
       .dH_over_H = true},
      {.name = "dH_over_H_many_tiles",
       .counts = {2000, 1500, 33, 1025, 900},
       .d = 264,
       .n = 1032,
       .T = 1000,
       .dH_over_H = true},
      {.name = "no_scores", .counts = ragged, .d = 200, .n = 136, .scores = false},
      {.name = "only_dH",
       .counts = ragged,
       .d = 200,
       .n = 136,
       .wants_A_scaled = false,
       .wants_ds = false},
      {.name = "only_ds",
       .counts = ragged,
       .d = 200,
       .n = 136,
       .wants_dH = false,
       .wants_A_scaled = false},
      {.name = "only_A_scaled",
       .counts = ragged,
       .d = 200,
       .n = 136,
       .wants_dH = false,
       .wants_ds = false},
      {.name = "adjacent_dH_over_H",
       .counts = ragged,
       .d = 200,
       .n = 328,
       .spare_rows = 20,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .dH_over_H = true},
      {.name = "adjacent_many_tiles",
       .counts = {2000, 1500, 33, 1025, 900},
       .d = 264,
       .n = 1032,
       .T = 1000,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .W2_transposed = true,
       .dH_over_H = true},
      {.name = "adjacent_nan_expert",
       .counts = ragged,
       .d = 256,
       .n = 192,
       .spare_rows = 90,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .nan_expert = 4},
      {.name = "adjacent_unit_scale",
       .counts = ragged,
       .d = 520,
       .n = 328,
       .activation = TILEMOE_SWIGLU,
       .gate_layout = TILEMOE_GATE_INTERLEAVED,
       .W1_transposed = true,
       .integers = false},
      {.name = "unit_scale", .counts = ragged, .d = 520, .n = 328, .integers = false}};
  // Every layout, with every dtype of the gradients, written and added; and again with experts so
  // long that blocks share their weight gradients. Either tile meets each of them: that of a weight
  // gradient follows from n.
  struct Layout {
    const char* name;
    tilemoe_gate_layout gate_layout;
    bool transposed;
    tilemoe_activation activation;
  };
  for (const Layout& layout :
       {Layout{"concatenated", TILEMOE_GATE_CONCATENATED, false, TILEMOE_REGLU},
        Layout{"concatenated_transposed", TILEMOE_GATE_CONCATENATED, true, TILEMOE_REGLU},
        Layout{"interleaved", TILEMOE_GATE_INTERLEAVED, false, TILEMOE_REGLU},
        Layout{"adjacent", TILEMOE_GATE_INTERLEAVED, true, TILEMOE_REGLU},
        Layout{"split", TILEMOE_GATE_SPLIT, false, TILEMOE_REGLU},
        Layout{"split_transposed", TILEMOE_GATE_SPLIT, true, TILEMOE_REGLU},
        Layout{"plain", TILEMOE_GATE_CONCATENATED, false, TILEMOE_IDENTITY},
        Layout{"plain_transposed", TILEMOE_GATE_CONCATENATED, true, TILEMOE_IDENTITY}})
    for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
      for (const bool float_gradients : {false, true})
        for (const bool accumulate : {false, true})
          for (const bool is_long : {false, true})
            all.push_back({.name = std::string(layout.name) +
                                   (dtype == TILEMOE_FLOAT16 ? "_float16" : "_bfloat16") +
                                   (float_gradients ? "_to_float32" : "") +
                                   (accumulate ? "_added" : "") + (is_long ? "_long" : ""),
                           .counts = is_long ? long_experts : ragged,
                           .d = float_gradients ? 264 : 200,
                           .n = is_long == accumulate ? 200 : 136,
                           .spare_rows = 9,
                           .dtype = dtype,
                           .activation = layout.activation,
                           .gate_layout = layout.gate_layout,
                           .W1_transposed = layout.transposed,
                           .W2_transposed = layout.transposed,
                           .float_gradients = float_gradients,
                           .accumulate = accumulate,
                           .tile = is_long == accumulate ? cuda::kCluster256 : cuda::kCluster192});
  for (const auto& [name, tile] :
       {std::pair("pairs256", cuda::kCluster256), std::pair("pairs192", cuda::kCluster192)})
    for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
      for (const bool transposed : {false, true})
        all.push_back({.name = std::string(name) +
                               (dtype == TILEMOE_FLOAT16 ? "_float16" : "_bfloat16") +
                               (transposed ? "_transposed" : ""),
                       .counts = {300, 1, 0, 640, 129},
                       .d = 1032,
                       .n = tile.block_n == 256 ? 200 : 136,
                       .spare_rows = 60,
                       .dtype = dtype,
                       .W1_transposed = transposed,
                       .nan_expert = 3,
                       .tile = tile});
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
    for (tilemoe_activation activation : kActivations)
      all.push_back({.name = std::string(tilemoe_activation_name(activation)) +
                             (dtype == TILEMOE_FLOAT16 ? "_float16" : ""),
                     .counts = ragged,
                     .d = 200,
                     .n = 264,
                     .dtype = dtype,
                     .activation = activation,
                     .integers = false});
  const cuda::Variant swiglu{.weights = cuda::Major::kMN,
                             .activations = cuda::Activations::kSwiGLU};
  const cuda::Tiles tiles({cuda::ProductName::kActivationGradient, cuda::KitName::kSm90, swiglu});
  for (const cuda::TileConfiguration& tile : tiles) {
    const std::string name = (tile.cluster == 1 ? "alone" : "pairs") + std::to_string(tile.block_n);
    BackwardCase base{.name = name,
                      .counts = ragged,
                      .d = 200,
                      .n = tile.block_n == 256 ? 248 : 264,
                      .spare_rows = 77,
                      .activation = TILEMOE_SWIGLU,
                      .integers = false,
                      .tile = tile};
    all.push_back(base);
    base.name = name + "_many_tiles_dH_over_H";
    base.counts = {2000, 1500, 33, 1025, 900};
    base.d = 1032, base.n = tile.block_n == 256 ? 760 : 776;
    base.T = 1000;
    base.dH_over_H = true;
    all.push_back(base);
  }
  BackwardCase gpt_oss{.name = "clamped_swiglu",
                       .counts = ragged,
                       .d = 200,
                       .n = 136,
                       .activation = TILEMOE_SWIGLU,
                       .integers = false,
                       .clamp = 1.25f,
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

INSTANTIATE_TEST_SUITE_P(Cuda, BackwardSteps, testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace tilemoe::test
