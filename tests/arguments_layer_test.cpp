// tilemoe_forward and tilemoe_backward, each argument wrong in every way.
#include <cmath>
#include <limits>
#include <string>

#include "activation_kinds.h"
#include "arguments_layer_problem.h"

namespace tilemoe::arguments {
namespace {

template <bool kSplit, bool kGrouped>
struct Forward : LayerProblem {
  Forward() : LayerProblem(kSplit, kGrouped) {}
  tilemoe_part part = whole_part();
  const char* function() const { return "tilemoe_forward"; }
  tilemoe_status call() { return tilemoe_forward(experts_pointer, args_pointer); }
  tilemoe_forward_args& args() { return forward; }
  size_t needed() const { return forward_workspace(); }
  const tilemoe_experts* experts_pointer = &experts;
  const tilemoe_forward_args* args_pointer = &forward;
};

template <bool kSplit, bool kGrouped>
struct Backward : LayerProblem {
  Backward() : LayerProblem(kSplit, kGrouped) {}
  tilemoe_part part = whole_part();
  const char* function() const { return "tilemoe_backward"; }
  tilemoe_status call() { return tilemoe_backward(experts_pointer, args_pointer); }
  tilemoe_backward_args& args() { return backward; }
  size_t needed() const { return backward_workspace(TILEMOE_BACKWARD_WHOLE); }
  const tilemoe_experts* experts_pointer = &experts;
  const tilemoe_backward_args* args_pointer = &backward;
};

template <class Problem>
void append(std::vector<BadCase<Problem>>& cases, std::vector<BadCase<Problem>> more) {
  cases.insert(cases.end(), more.begin(), more.end());
}

template <class Problem>
void append_weights(std::vector<BadCase<Problem>>& cases, bool split) {
  using A = Argument<Problem>;
  append(cases,
         tensor_cases(A{"weights.W1", [](Problem& p) -> tilemoe_tensor& { return p.weights.W1; },
                        Layout::kMatrix}  // namespace
                      ));
  append(cases, tensor_cases(A{"weights.W2",
                               [](Problem& p) -> tilemoe_tensor& {
                                 return p.weights.W2;
                               }  // namespace tilemoe::arguments
                               ,
                               Layout::kMatrix}));
  append(cases,
         tensor_cases(A{"weights.b1", [](Problem& p) -> tilemoe_tensor& { return p.weights.b1; },
                        Layout::kRows, true}));
  append(cases,
         tensor_cases(A{"weights.b2", [](Problem& p) -> tilemoe_tensor& { return p.weights.b2; },
                        Layout::kRows, true}));
  if (split) {
    append(cases, tensor_cases(A{"weights.W1_up",
                                 [](Problem& p) -> tilemoe_tensor& { return p.weights.W1_up; },
                                 Layout::kMatrix}));
    append(cases, tensor_cases(A{"weights.b1_up",
                                 [](Problem& p) -> tilemoe_tensor& { return p.weights.b1_up; },
                                 Layout::kRows}));
    cases.push_back({"weights.b1 absent beside b1_up",
                     [](Problem& p) { p.weights.b1 = {}; },
                     {"weights.b1", "b1_up"}});
  } else {
    cases.push_back({"weights.W1_up without the split layout",
                     [](Problem& p) { p.weights.W1_up = p.weights.W2; },
                     {"weights.W1_up", "(5, 24, 16)"}});
    cases.push_back({"weights.b1_up without the split layout",
                     [](Problem& p) { p.weights.b1_up = p.weights.b2; },
                     {"weights.b1_up", "(5, 24)"}});
  }
}

// What both passes are given beside their tensors.
template <class Problem>
std::vector<BadCase<Problem>> shared_cases() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<BadCase<Problem>> cases = {
      {"experts null", [](Problem& p) { p.experts_pointer = nullptr; }, {"experts is null"}},
      {"args null", [](Problem& p) { p.args_pointer = nullptr; }, {"args is null"}},
      {"experts.struct_size", [](Problem& p) { p.experts.struct_size = 8; }, {"struct_size"}},
      {"args.struct_size", [](Problem& p) { p.args().struct_size = 0; }, {"struct_size is 0"}},
      {"weights null", [](Problem& p) { p.args().weights = nullptr; }, {"weights is null"}},
      {"weights.struct_size",
       [](Problem& p) { p.weights.struct_size = 0; },
       {"weights.struct_size"}},
      {"block_turns negative",
       [](Problem& p) { p.args().block_turns = -1; },
       {"block_turns is -1"}},
      {"block_turns 17", [](Problem& p) { p.args().block_turns = 17; }, {"block_turns is 17"}},
      {"reserved", [](Problem& p) { p.args().reserved = 1; }, {"reserved is 1"}},
      {"part.struct_size",
       [](Problem& p) { p.args().part = &p.part, p.part.struct_size = 8; },
       {"part.struct_size"}},
      {"part.reserved",
       [](Problem& p) { p.args().part = &p.part, p.part.reserved = 1; },
       {"reserved is 1"}},
      {"part.last",
       [](Problem& p) { p.args().part = &p.part, p.part.last = 2; },
       {"part.last is 2"}},
      {"part.begins null",
       [](Problem& p) { p.args().part = &p.part, p.part.begins = nullptr; },
       {"part"}},
      {"part.ends null",
       [](Problem& p) { p.args().part = &p.part, p.part.ends = nullptr; },
       {"part"}},
      {"part from before the first token",
       [](Problem& p) { p.args().part = &p.part, p.part.first_token = -1; },
       {"part"}},
      {"part of a token too many",
       [](Problem& p) { p.args().part = &p.part, p.part.tokens = p.spec.T + 1; },
       {"part"}},
      {"part of no number",
       [](Problem& p) { p.args().part = &p.part, p.part.tokens = INT64_MIN; },
       {"part"}},
      {"part past the last token",
       [](Problem& p) { p.args().part = &p.part, p.part.first_token = INT64_MAX; },
       {"part"}},
      {"routing null", [](Problem& p) { p.args().routing = nullptr; }, {"routing is null"}},
      {"routing.struct_size", [](Problem& p) { p.routing.struct_size = 1; }, {"routing.struct"}},
      {"routing never bound",
       [](Problem& p) {
         const tilemoe_routing_spec spec = p.routing.spec;
         p.routing = {};
         p.routing.struct_size = sizeof p.routing, p.routing.spec = spec;
       },
       {"routing", "bind"}},
      {"routing without offsets", [](Problem& p) { p.routing.offsets = nullptr; }, {"routing"}},
      {"routing without counters", [](Problem& p) { p.routing.counters = nullptr; }, {"routing"}},
      {"routing without scores", [](Problem& p) { p.routing.row_score = nullptr; }, {"routing"}},
      {"capacity changed", [](Problem& p) { p.routing.spec.capacity += 16; }, {"routing"}},
      {"capacity negative", [](Problem& p) { p.routing.spec.capacity = -1; }, {"capacity is -1"}},
      {"routing kind", [](Problem& p) { p.routing.spec.kind = tilemoe_routing_kind(4); }, {"kind"}},
      {"routing kind changed",
       [](Problem& p) { p.routing.spec.kind = TILEMOE_ROUTING_GENERAL; },
       {"routing"}},
      {"routing E", [](Problem& p) { p.routing.spec.E = 4; }, {}},
      {"experts.E against the routing's", [](Problem& p) { p.experts.E = 6; }, {"E is 6", "5"}},
      {"experts.E zero", [](Problem& p) { p.experts.E = 0; }, {"E is 0"}},
      {"experts.E negative", [](Problem& p) { p.experts.E = -5; }, {"E is -5"}},
      {"experts.E huge", [](Problem& p) { p.experts.E = INT64_MAX; }, {"9223372036854775807"}},
      {"routing's device", [](Problem& p) { p.routing.spec.device = TILEMOE_CUDA; }, {"device"}},
      {"device unknown",
       [](Problem& p) { p.experts.device = p.routing.spec.device = tilemoe_device(9); },
       {"device is 9"}},
      {"experts.device alone", [](Problem& p) { p.experts.device = TILEMOE_CUDA; }, {"device"}},
      {"cuda, not built",
       [](Problem& p) { p.experts.device = p.routing.spec.device = TILEMOE_CUDA; },
       {"CUDA"},
       TILEMOE_UNSUPPORTED},
      {"dtype int32", [](Problem& p) { p.experts.dtype = TILEMOE_INT32; }, {"dtype is int32"}},
      {"dtype 77", [](Problem& p) { p.experts.dtype = tilemoe_dtype(77); }, {"dtype"}},
      {"activation past the last",
       [](Problem& p) { p.experts.activation = tilemoe_activation(kActivationCount); },
       {"activation is " + std::to_string(kActivationCount)}},
      {"activation -1",
       [](Problem& p) { p.experts.activation = tilemoe_activation(-1); },
       {"activation is -1"}},
      {"gate_layout 3",
       [](Problem& p) { p.experts.gate_layout = tilemoe_gate_layout(3); },
       {"gate_layout is 3"}},
      {"gate layout of no gate",
       [](Problem& p) {
         p.experts.activation = TILEMOE_RELU, p.experts.gate_layout = TILEMOE_GATE_INTERLEAVED;
       },
       {"relu", "gate_layout"}},
      {"clamp of geglu",
       [](Problem& p) { p.experts.activation = TILEMOE_GEGLU, p.experts.clamp = 7; },
       {"clamp", "geglu"}},
      {"clamp negative", [](Problem& p) { p.experts.clamp = -1; }, {"clamp -1"}},
      {"column_blocks negative",
       [](Problem& p) { p.experts.column_blocks = -1; },
       {"column_blocks is -1"}},
      {"clamp NaN", [nan](Problem& p) { p.experts.clamp = nan; }, {"clamp"}},
      {"alpha infinite", [infinity](Problem& p) { p.experts.alpha = infinity; }, {"alpha inf"}},
      {"up_shift NaN", [nan](Problem& p) { p.experts.up_shift = nan; }, {"up_shift"}},
      {"workspace one byte short",
       [](Problem& p) { p.args().workspace_bytes = p.needed() - 1; },
       {"workspace", "bytes"}},
      {"workspace of no bytes", [](Problem& p) { p.args().workspace_bytes = 0; }, {"0 bytes"}},
      {"workspace null", [](Problem& p) { p.args().workspace = nullptr; }, {"workspace is null"}},
      {"workspace misaligned",
       [](Problem& p) { p.args().workspace = static_cast<char*>(p.args().workspace) + 8; },
       {"workspace", "16 bytes"}},
  };
  for (const char* name : {"d", "n"})
    for (int64_t width :
         {int64_t{0}, int64_t{-8}, int64_t{12}, int64_t{7}, int64_t{1} << 40, INT64_MAX, INT64_MIN})
      cases.push_back(
          {std::string(name) + " = " + std::to_string(width),
           [name, width](Problem& p) { (*name == 'd' ? p.experts.d : p.experts.n) = width; },
           {std::string(name) + " is " + std::to_string(width)}});
  return cases;
}

// Rows of width d, (T, d) or, grouped, (capacity, d).
template <class Problem, class Get>
void append_rows(std::vector<BadCase<Problem>>& cases, const char* name, bool optional, Get get) {
  append(cases, tensor_cases(Argument<Problem>{name, get, Layout::kRows, optional}));
}

template <class Problem>
void append_saved(std::vector<BadCase<Problem>>& cases) {
  append(cases, tensor_cases(Argument<Problem>{
                    "saved.H", [](Problem& p) -> tilemoe_tensor& { return p.saved.H; },
                    Layout::kContiguous}));
}

template <class Problem>
std::vector<BadCase<Problem>> forward_cases(bool split) {
  auto cases = shared_cases<Problem>();
  append_weights(cases, split);
  append_rows(cases, "X", false, [](Problem& p) -> tilemoe_tensor& { return p.forward.X; });
  append_rows(cases, "O", false, [](Problem& p) -> tilemoe_tensor& { return p.forward.O; });
  append_rows(cases, "addend", true,
              [](Problem& p) -> tilemoe_tensor& { return p.forward.addend; });
  append_saved(cases);
  return cases;
}

template <class Problem>
std::vector<BadCase<Problem>> backward_cases(bool split) {
  auto cases = shared_cases<Problem>();
  append_weights(cases, split);
  append_rows(cases, "X", false, [](Problem& p) -> tilemoe_tensor& { return p.backward.X; });
  append_rows(cases, "dO", false, [](Problem& p) -> tilemoe_tensor& { return p.backward.dO; });
  append_rows(cases, "dX", true, [](Problem& p) -> tilemoe_tensor& { return p.backward.dX; });
  append_rows(cases, "addend", true,
              [](Problem& p) -> tilemoe_tensor& { return p.backward.addend; });
  append_saved(cases);
  const auto add = [&](const char* name, Layout layout, auto get) {
    append(cases, tensor_cases(Argument<Problem>{name, get, layout, true}));
  };
  add("dweights.W1", Layout::kMatrix, [](Problem& p) -> tilemoe_tensor& { return p.dweights.W1; });
  add("dweights.W2", Layout::kMatrix, [](Problem& p) -> tilemoe_tensor& { return p.dweights.W2; });
  add("dweights.b1", Layout::kRows, [](Problem& p) -> tilemoe_tensor& { return p.dweights.b1; });
  add("dweights.b2", Layout::kRows, [](Problem& p) -> tilemoe_tensor& { return p.dweights.b2; });
  if (split) {
    add("dweights.W1_up", Layout::kMatrix,
        [](Problem& p) -> tilemoe_tensor& { return p.dweights.W1_up; });
    add("dweights.b1_up", Layout::kRows,
        [](Problem& p) -> tilemoe_tensor& { return p.dweights.b1_up; });
  }
  append(cases, tensor_cases(Argument<Problem>{
                    "ds", [](Problem& p) -> tilemoe_tensor& { return p.backward.ds; },
                    Layout::kContiguous, true, false}));
  for (int32_t accumulate : {-1, 2, INT32_MAX})
    cases.push_back({"accumulate " + std::to_string(accumulate),
                     [accumulate](Problem& p) { p.backward.accumulate = accumulate; },
                     {"accumulate is"}});
  for (int mode : {-1, 4, 1 << 20})
    cases.push_back({"mode " + std::to_string(mode),
                     [mode](Problem& p) { p.backward.mode = tilemoe_backward_mode(mode); },
                     {"mode is " + std::to_string(mode)}});
  for (int32_t size : {0, 8, 4096 + 8})
    cases.push_back({"dweights.struct_size",
                     [size](Problem& p) { p.dweights.struct_size = static_cast<uint64_t>(size); },
                     {"dweights.struct_size"}});
  cases.push_back(
      {"saved null", [](Problem& p) { p.backward.saved = nullptr; }, {"saved is null"}});
  cases.push_back({"consumed saved state",
                   [](Problem& p) { p.saved.state = TILEMOE_SAVED_DH_OVER_H; },
                   {"consumed", "forward again"}});
  for (int state : {-1, 4})
    cases.push_back({"saved state " + std::to_string(state),
                     [state](Problem& p) { p.saved.state = tilemoe_saved_state(state); },
                     {"saved.state is"}});
  cases.push_back(
      {"saved.struct_size", [](Problem& p) { p.saved.struct_size -= 16; }, {"saved.struct_size"}});
  cases.push_back({"addend without dX", [](Problem& p) { p.backward.dX = {}; }, {"addend", "dX"}});
  return cases;
}

// A case more or less is a change to the table; far fewer means that the table is not built.
constexpr size_t kLeastCases = 250;

TEST(ForwardArguments, Routed) {
  using Problem = Forward<false, false>;
  const auto cases = forward_cases<Problem>(false);
  EXPECT_GT(cases.size(), kLeastCases);
  run_cases(cases);
}

TEST(ForwardArguments, Split) {
  run_cases(forward_cases<Forward<true, false>>(true));
}
TEST(ForwardArguments, Grouped) {
  run_cases(forward_cases<Forward<false, true>>(false));
}

TEST(BackwardArguments, Routed) {
  using Problem = Backward<false, false>;
  const auto cases = backward_cases<Problem>(false);
  EXPECT_GT(cases.size(), kLeastCases);
  run_cases(cases);
}

TEST(BackwardArguments, Split) {
  run_cases(backward_cases<Backward<true, false>>(true));
}
TEST(BackwardArguments, Grouped) {
  run_cases(backward_cases<Backward<false, true>>(false));
}

// What is optional may be left out, alone and together.
TEST(ForwardArguments, OptionalOnesMayBeAbsent) {
  Forward<false, false> p;
  p.forward.addend = p.weights.b1 = p.weights.b2 = {};
  p.forward.saved = nullptr;
  EXPECT_EQ(p.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
}

TEST(BackwardArguments, NothingWantedWritesNothing) {
  Backward<false, false> p;
  p.backward.dX = p.backward.addend = p.backward.ds = {};
  p.backward.dweights = nullptr;
  const auto before = p.arena.bytes();
  EXPECT_EQ(p.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  EXPECT_TRUE(p.arena.bytes() == before);
}

TEST(BackwardArguments, TopKMayHaveDsOfEitherShape) {
  Backward<false, false> p;
  p.backward.ds = tensor(p.backward.ds.data, TILEMOE_FLOAT32, {kT, kK});
  EXPECT_EQ(p.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  p.backward.ds = tensor(p.backward.ds.data, TILEMOE_FLOAT32, {kK, kT});
  EXPECT_EQ(p.call(), TILEMOE_INVALID_ARGUMENT);
}

// dH over H consumes the saved state: the second backward is an error, and forward renews it.
TEST(BackwardArguments, ConsumedStateIsRenewedByForward) {
  Backward<false, false> p;
  p.forward.saved = &p.saved;
  ASSERT_EQ(tilemoe_forward(&p.experts, &p.forward), TILEMOE_SUCCESS) << tilemoe_last_error();
  p.backward.mode = TILEMOE_BACKWARD_OVER_H;
  ASSERT_EQ(p.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  EXPECT_EQ(p.saved.state, TILEMOE_SAVED_DH_OVER_H);
  const auto before = p.arena.bytes();
  EXPECT_EQ(p.call(), TILEMOE_INVALID_ARGUMENT);
  EXPECT_TRUE(p.arena.bytes() == before);
  ASSERT_EQ(tilemoe_forward(&p.experts, &p.forward), TILEMOE_SUCCESS) << tilemoe_last_error();
  EXPECT_EQ(p.saved.state, TILEMOE_SAVED_H);
  EXPECT_EQ(p.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
}

}  // namespace
}  // namespace tilemoe::arguments
