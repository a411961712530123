// Outputs that share memory with something else: what is right, and what is refused.
#include <algorithm>
#include <functional>

#include "arguments_layer_problem.h"
#include "memory_use.h"
#include "tilemoe/error.h"

namespace tilemoe::arguments {
namespace {

bool shares(const tilemoe_tensor& a, const tilemoe_tensor& b) {
  MemoryUse memory;
  memory.writes("a", a);
  memory.reads("b", b);
  try {
    memory.check();
    return false;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a shares memory with b"), std::string::npos);
    return true;
  }
}

tilemoe_tensor strided(float* data, std::vector<int64_t> shape, std::vector<int64_t> stride) {
  tilemoe_tensor view = tensor(data, TILEMOE_FLOAT32, shape);
  std::copy(stride.begin(), stride.end(), view.stride);
  return view;
}

TEST(MemoryUse, RangesThatTouch) {
  std::vector<float> data(100);
  const auto at = [&](int64_t first, int64_t count) {
    return tensor(&data[first], TILEMOE_FLOAT32, {count});
  };
  EXPECT_FALSE(shares(at(0, 10), at(10, 10)));
  EXPECT_TRUE(shares(at(0, 11), at(10, 10)));
  EXPECT_TRUE(shares(at(10, 10), at(0, 11)));
  EXPECT_TRUE(shares(at(0, 100), at(50, 1)));
  EXPECT_FALSE(shares(at(0, 0), at(0, 10)));
  EXPECT_FALSE(shares(tilemoe_tensor{}, at(0, 10)));
}

// Views of one matrix, with its strides, that interleave.
TEST(MemoryUse, ColumnsOfOneMatrix) {
  std::vector<float> data(1000);
  const auto columns = [&](int64_t first, int64_t count) {
    return strided(&data[first], {10, count}, {100, 1});
  };
  EXPECT_FALSE(shares(columns(0, 50), columns(50, 50)));
  EXPECT_FALSE(shares(columns(50, 50), columns(0, 50)));
  EXPECT_TRUE(shares(columns(0, 51), columns(50, 50)));
  EXPECT_TRUE(shares(columns(0, 60), columns(20, 10)));
  // gate and up rows of one tensor of all experts; and rows that alternate
  EXPECT_FALSE(shares(strided(&data[0], {5, 4, 20}, {200, 20, 1}),
                      strided(&data[80], {5, 6, 20}, {200, 20, 1})));
  EXPECT_FALSE(shares(strided(&data[0], {5, 5, 20}, {200, 40, 1}),
                      strided(&data[20], {5, 5, 20}, {200, 40, 1})));
  EXPECT_TRUE(shares(strided(&data[0], {5, 5, 21}, {200, 40, 1}),
                     strided(&data[20], {5, 5, 20}, {200, 40, 1})));
  // of other strides nothing is known
  EXPECT_TRUE(shares(columns(0, 50), strided(&data[50], {5, 50}, {200, 1})));
}

// Against every element, for small views at every distance.
TEST(MemoryUse, AgreesWithElements) {
  std::vector<float> data(200);
  int meetings = 0, pairs = 0;
  for (const int64_t rows : {1, 2, 3})
    for (const int64_t columns : {1, 2, 4})
      for (const int64_t other_rows : {1, 3})
        for (const int64_t other_columns : {1, 3, 4})
          for (const int64_t row : {4, 7})
            for (int64_t first = 0; first < 60; ++first) {
              const auto a = strided(&data[40], {rows, columns}, {row, 1});
              const auto b = strided(&data[first], {other_rows, other_columns}, {row, 1});
              std::vector<int> seen(data.size());
              const auto mark = [&](const tilemoe_tensor& view) {
                for (int64_t i = 0; i < view.shape[0]; ++i)
                  for (int64_t j = 0; j < view.shape[1]; ++j)
                    ++seen[static_cast<size_t>(static_cast<float*>(view.data) - data.data() +
                                               i * row + j)];
              };
              mark(a), mark(b);
              const bool meet = *std::max_element(seen.begin(), seen.end()) > 1;
              EXPECT_EQ(shares(a, b), meet) << rows << " " << columns << " " << other_rows << " "
                                            << other_columns << " " << row << " " << first;
              meetings += meet, ++pairs;
            }
  EXPECT_GT(meetings, pairs / 10);
  EXPECT_LT(meetings, pairs * 9 / 10);
}

using Layer = LayerProblem;

void expect_refused(const char* output, const char* other, bool backward,
                    const std::function<void(Layer&)>& alias) {
  Layer p(true);
  p.require(tilemoe_forward(&p.experts, &p.forward));
  alias(p);
  const auto before = p.arena.bytes();
  const tilemoe_status status = backward ? tilemoe_backward(&p.experts, &p.backward)
                                         : tilemoe_forward(&p.experts, &p.forward);
  EXPECT_EQ(status, TILEMOE_INVALID_ARGUMENT) << output << " and " << other;
  const std::string error = tilemoe_last_error();
  EXPECT_NE(error.find("shares memory with"), std::string::npos) << error;
  EXPECT_NE(error.find(output), std::string::npos) << error;
  EXPECT_NE(error.find(other), std::string::npos) << error;
  EXPECT_TRUE(p.arena.bytes() == before) << "wrote";
}

// The bytes of an output laid over another array; its strides and shape stay.
void move_to(tilemoe_tensor& tensor, const void* where) {
  tensor.data = const_cast<void*>(where);
}

TEST(LayerAliasing, ForwardRefuses) {
  const auto refuses = [](const char* output, const char* other, auto alias) {
    expect_refused(output, other, false, alias);
  };
  refuses("O", "weights.W1", [](Layer& p) { move_to(p.forward.O, p.weights.W1.data); });
  refuses("O", "weights.W2", [](Layer& p) { move_to(p.forward.O, p.weights.W2.data); });
  refuses("O", "workspace", [](Layer& p) { move_to(p.forward.O, p.forward.workspace); });
  refuses("O", "saved.H", [](Layer& p) { move_to(p.forward.O, p.saved.H.data); });
  refuses("O", "routing", [](Layer& p) { move_to(p.forward.O, p.routing.row_score); });
  refuses("saved.H", "X", [](Layer& p) { move_to(p.forward.X, p.saved.H.data); });
  refuses("workspace", "X", [](Layer& p) { move_to(p.forward.X, p.forward.workspace); });
  refuses("O", "addend", [](Layer& p) {  // one row further
    move_to(p.forward.addend, static_cast<float*>(p.forward.O.data) + kD);
  });
}

TEST(LayerAliasing, BackwardRefuses) {
  const auto refuses = [](const char* output, const char* other, auto alias) {
    expect_refused(output, other, true, alias);
  };
  refuses("dX", "X", [](Layer& p) { move_to(p.backward.dX, p.backward.X.data); });
  refuses("dX", "dO", [](Layer& p) { move_to(p.backward.dX, p.backward.dO.data); });
  refuses("dX", "addend", [](Layer& p) {
    move_to(p.backward.addend, static_cast<float*>(p.backward.dX.data) - kD);
  });
  refuses("dX", "saved.H", [](Layer& p) { move_to(p.backward.dX, p.saved.H.data); });
  refuses("dX", "weights.W1", [](Layer& p) { move_to(p.backward.dX, p.weights.W1.data); });
  refuses("dX", "workspace", [](Layer& p) { move_to(p.backward.dX, p.backward.workspace); });
  refuses("ds", "dO", [](Layer& p) { move_to(p.backward.ds, p.backward.dO.data); });
  refuses("ds", "routing", [](Layer& p) { move_to(p.backward.ds, p.routing.row_score); });
  refuses("dweights.W1", "weights.W1", [](Layer& p) { move_to(p.dweights.W1, p.weights.W1.data); });
  refuses("dweights.W2", "weights.W2", [](Layer& p) { move_to(p.dweights.W2, p.weights.W2.data); });
  refuses("dweights.W1", "dweights.W1_up",
          [](Layer& p) { move_to(p.dweights.W1, p.dweights.W1_up.data); });
  refuses("dweights.b2", "weights.b2", [](Layer& p) { move_to(p.dweights.b2, p.weights.b2.data); });
  refuses("saved.H", "X", [](Layer& p) {
    p.backward.mode = TILEMOE_BACKWARD_OVER_H;
    move_to(p.backward.X, p.saved.H.data);
  });
}

std::vector<float> values(const tilemoe_tensor& view) {
  const auto* const first = static_cast<const float*>(view.data);
  return {first, first + view.shape[0] * view.shape[1]};
}

TEST(LayerAliasing, OMayLieOverXOrTheAddend) {
  for (const int32_t column_blocks : {1, 3}) {
    Layer apart, over_X, over_addend;
    for (Layer* p : {&apart, &over_X, &over_addend}) p->experts.column_blocks = column_blocks;
    move_to(over_X.forward.O, over_X.forward.X.data);
    move_to(over_addend.forward.O, over_addend.forward.addend.data);
    for (Layer* p : {&apart, &over_X, &over_addend}) {
      p->require(tilemoe_forward(&p->experts, &p->forward));
      EXPECT_EQ(values(p->forward.O), values(apart.forward.O));
    }
  }
}

TEST(LayerAliasing, DXMayBeItsAddend) {
  Layer apart, over;
  move_to(over.backward.dX, over.backward.addend.data);
  for (Layer* p : {&apart, &over}) {
    p->require(tilemoe_forward(&p->experts, &p->forward));
    p->require(tilemoe_backward(&p->experts, &p->backward));
  }
  EXPECT_EQ(values(over.backward.dX), values(apart.backward.dX));
  EXPECT_EQ(values(over.backward.ds), values(apart.backward.ds));
}

// REST reads no dO, so dX may have its memory.
TEST(LayerAliasing, DXMayLieOverDOInAStageThatDoesNotReadIt) {
  Layer whole, staged;
  for (Layer* p : {&whole, &staged}) p->require(tilemoe_forward(&p->experts, &p->forward));
  whole.require(tilemoe_backward(&whole.experts, &whole.backward));
  tilemoe_backward_args first = staged.backward, rest = staged.backward;
  const tilemoe_weights none = {sizeof(tilemoe_weights), {}, {}, {}, {}, {}, {}};
  first.mode = TILEMOE_BACKWARD_FIRST, rest.mode = TILEMOE_BACKWARD_REST;
  first.dX = first.addend = rest.ds = {};
  first.dweights = rest.dweights = &none;
  staged.require(tilemoe_backward(&staged.experts, &first));
  move_to(rest.dX, rest.dO.data);
  staged.require(tilemoe_backward(&staged.experts, &rest));
  EXPECT_EQ(values(rest.dX), values(whole.backward.dX));
}

}  // namespace
}  // namespace tilemoe::arguments
