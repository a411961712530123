// A step with the second source of its sum, an adapter's rows and factor: its operands among NaN,
// and what it must compute.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/cuda_backend.h"
#include "lora_problem.h"
#include "lora_rows.h"

namespace tilemoe::test::adapter {

// Two column blocks of every step and tile, and a partial k block of every sum.
inline constexpr int64_t kD = 264, kN = 136;

enum class Gemm { kUp, kDown, kActivation, kInput };

struct Case {
  std::string setting;
  Gemm gemm = Gemm::kUp;
  tilemoe_activation activation = TILEMOE_REGLU;
  tilemoe_gate_layout layout = TILEMOE_GATE_CONCATENATED;
  bool dense_last = true;  // the last dimension of W1 and W2 is contiguous, else the other one
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  int64_t rank = 16;
  bool gathers = true;
  int32_t first_experts_rows = 36;
  std::optional<cuda::TileConfiguration> tile = {};  // the one chosen, if none is given

  bool gated() const { return tilemoe_activation_gated(activation) != 0; }
  bool interleaved() const { return gated() && layout == TILEMOE_GATE_INTERLEAVED; }
  bool interleaved_columns() const { return interleaved() && !dense_last; }
  bool clamped() const { return interleaved() && activation == TILEMOE_SWIGLU; }  // gpt-oss
  int64_t h_columns() const { return gated() ? 2 * kN : kN; }
  bool gathers_rows() const { return gathers && (gemm == Gemm::kUp || gemm == Gemm::kActivation); }
  bool is_forward() const { return gemm == Gemm::kUp || gemm == Gemm::kDown; }
  bool makes_d_columns() const { return gemm == Gemm::kDown || gemm == Gemm::kInput; }
  int64_t columns() const {  // of the GEMM
    switch (gemm) {
      case Gemm::kUp: return h_columns();
      case Gemm::kActivation: return kN;
      default: return kD;
    }
  }
  int64_t sum() const {
    switch (gemm) {
      case Gemm::kDown: return kN;
      case Gemm::kInput: return h_columns();
      default: return kD;
    }
  }
};

// A column of H, gate columns first, and its place in memory with or without interleaving.
inline int64_t column_at(int64_t place, bool interleaved) {
  return interleaved ? place % 2 * kN + place / 2 : place;
}

// Every operand is value(index, salt); columns of H count gate columns first.
using Value = double (*)(const Index& index, int64_t salt);
inline double small(const Index& index, int64_t salt) {
  return whole(index, salt, 2);
}
inline double fraction(const Index& index, int64_t salt) {
  return whole(index, salt, 100) * 0.0137;
}

// (E, rows, columns) with margins of NaN around it and between its lines.
inline PlacedTensor weights_of(tilemoe_dtype dtype, int64_t E, int64_t rows, int64_t columns,
                               bool dense_last) {
  const int64_t line = (dense_last ? columns : rows) + 2 * kMargin;
  const int64_t lines = (dense_last ? rows : columns) + 2;
  return PlacedTensor(
      dtype, {E, rows, columns},
      {lines * line, dense_last ? line : int64_t{1}, dense_last ? int64_t{1} : line},
      line + kMargin, line + kMargin);
}

class Problem {
 public:
  Problem(const Case& c, Value value)
      : case_(c),
        value_(value),
        rows_({c.first_experts_rows, 0, 3}, 70, 37),
        W1_(weights_of(c.dtype, rows_.E, halves() == 2 ? kN : c.h_columns(), kD, c.dense_last)),
        W1_up_(weights_of(c.dtype, rows_.E, kN, kD, c.dense_last)),
        W2_(weights_of(c.dtype, rows_.E, kD, kN, c.dense_last)),
        source_(PlacedTensor::columns(c.dtype, c.gathers_rows() ? rows_.T : rows_.capacity, c.sum(),
                                      c.sum() + 2 * kMargin, kMargin)),
        H_(c.dtype, {rows_.capacity, c.h_columns()}, {c.h_columns(), 1}),
        P_(PlacedTensor::columns(c.dtype, rows_.capacity, c.rank, c.rank + 2 * kMargin, kMargin)),
        factor_(weights_of(c.dtype, rows_.E, c.columns(), c.rank, c.dense_last == c.is_forward())) {
    const bool split = halves() == 2;
    W1_.fill([&](const Index& i) {
      return W1(i[0], split ? i[1] : column_at(i[1], c.interleaved()), i[2]);
    });
    W1_up_.fill([&](const Index& i) { return W1(i[0], kN + i[1], i[2]); });
    W2_.fill([&](const Index& i) { return W2(i[0], i[1], i[2]); });
    const bool reads_dH = c.gemm == Gemm::kInput;
    source_.fill([&](const Index& i) {
      if (!c.gathers_rows() && i[0] >= rows_.M) return double{NAN};
      return source(i[0], reads_dH ? column_at(i[1], c.interleaved_columns()) : i[1]);
    });
    H_.fill([&](const Index& i) {
      return i[0] < rows_.M ? H(i[0], column_at(i[1], c.interleaved_columns())) : NAN;
    });
    P_.fill([&](const Index& i) { return i[0] < rows_.M ? P(i[0], i[1]) : NAN; });
  }

  // The outputs of the step: H and A, Y, dH and A' and the partial sums of ds, or dX~.
  struct Outputs {
    Outputs(const Case& c, int64_t capacity)
        : Outputs(c.dtype, capacity, c.makes_d_columns() ? kD : c.h_columns()) {}
    Outputs(tilemoe_dtype dtype, int64_t capacity, int64_t columns)
        : wide(dtype, {capacity, columns}, {columns, 1}),
          A(dtype, {capacity, kN}, {kN, 1}),
          ds(TILEMOE_FLOAT32, {ds_groups(kN), capacity}, {capacity, 1}) {}
    PlacedTensor wide, A, ds;
  };

  // With the factor times `scale`, or without an adapter.
  Outputs& run(std::optional<double> scale) {
    Outputs& out = outputs_.emplace_back(case_, rows_.capacity);
    factor_.fill([&](const Index& i) {
      const bool of_H = case_.gemm == Gemm::kUp;
      return scale.value_or(0) *
             factor(i[0], of_H ? column_at(i[1], case_.interleaved_columns()) : i[1], i[2]);
    });
    const Steps& steps = cuda::backend().steps;
    visit_step(out, scale.has_value(), [&]<class Step>(const Step& step) {
      if constexpr (std::is_same_v<Step, UpProjection>) steps.up_projection.run(step);
      if constexpr (std::is_same_v<Step, DownProjection>) steps.down_projection.run(step);
      if constexpr (std::is_same_v<Step, ActivationGradient>) steps.activation_gradient.run(step);
      if constexpr (std::is_same_v<Step, InputGradient>) steps.input_gradient.run(step);
    });
    expect_clean_run();
    return out;
  }
  // The tiles of the step with an adapter.
  std::vector<cuda::TileConfiguration> tiles() {
    std::vector<cuda::TileConfiguration> tiles;
    visit_step(outputs_.emplace_back(case_, rows_.capacity), true, [&](const auto& step) {
      const auto found = cuda::tiles_of(cuda::key_of(step));
      tiles.assign(found.begin(), found.end());
    });
    return tiles;
  }
  // Adds the kernel of the step with an adapter, which does not run.
  void add_kernel(ChosenKernels& kernels) {
    visit_step(outputs_.emplace_back(case_, rows_.capacity), true,
               [&](const auto& step) { kernels.add(step); });
  }

  // Whole numbers: every product and sum is exact.
  void expect_exact(Outputs& out) const {
    const Case& c = case_;
    const std::vector<float> sums = multiply();
    const auto sum = [&](int64_t row, int64_t column) -> double {
      return sums[static_cast<size_t>(row * c.columns() + column)];
    };
    const auto row_exists = [&](const Index& i) { return i[0] < rows_.M; };
    if (c.makes_d_columns()) {
      out.wide.expect("Y or dX~", row_exists, [&](const Index& i) { return sum(i[0], i[1]); });
      return;
    }
    const auto relu = [](double x) { return std::max(x, 0.0); };
    if (c.gemm == Gemm::kUp) {
      out.wide.expect("H", row_exists, [&](const Index& i) {
        return sum(i[0], column_at(i[1], c.interleaved_columns()));
      });
      if (c.activation == TILEMOE_SWIGLU) return;  // H has the same accumulators
      out.A.expect("A", row_exists, [&](const Index& i) {
        return relu(sum(i[0], i[1])) * (c.gated() ? sum(i[0], kN + i[1]) : 1);
      });
      return;
    }
    const auto score = [&](int64_t row) { return rows_.score.at({row, 0, 0}); };
    const auto up = [&](int64_t row, int64_t j) {
      return c.gated() ? H(row, kN + j) + (c.clamped() ? 1 : 0) : 1;
    };
    out.wide.expect("dH", row_exists, [&](const Index& i) {
      const int64_t h = column_at(i[1], c.interleaved_columns()), j = h % kN;
      const double dA = score(i[0]) * sum(i[0], j), gate = H(i[0], j);
      if (h >= kN) return dA * relu(gate);
      // The gate of SwiGLU is 0, where the derivative is a half.
      const double slope = c.activation == TILEMOE_SWIGLU ? 0.5 : gate > 0 ? 1 : 0;
      return dA * up(i[0], j) * slope;
    });
    out.A.expect("A'", row_exists, [&](const Index& i) {
      return score(i[0]) * relu(H(i[0], i[1])) * up(i[0], i[1]);
    });
    out.ds.expect(
        "ds", [&](const Index& i) { return i[1] < rows_.M; },
        [&](const Index& i) {
          double ds = 0;
          for (int64_t j = i[0] * kDsColumns; j < std::min(kN, (i[0] + 1) * kDsColumns); ++j)
            ds += sum(i[1], j) * relu(H(i[1], j)) * up(i[1], j);
          return ds;
        });
  }

 private:
  int64_t halves() const { return case_.gated() && case_.layout == TILEMOE_GATE_SPLIT ? 2 : 1; }

  // Calls visit(the step's arguments).
  template <class Visit>
  void visit_step(Outputs& out, bool has_adapter, const Visit& visit) const {
    const Case& c = case_;
    tilemoe_experts experts{};
    experts.struct_size = sizeof experts;
    experts.dtype = c.dtype, experts.E = rows_.E, experts.d = kD, experts.n = kN;
    experts.activation = c.activation, experts.gate_layout = c.layout;
    if (c.clamped()) experts.clamp = 7, experts.alpha = 1.702f, experts.up_shift = 1;
    Tuning tuning;
    tuning.tile = c.tile ? &*c.tile : nullptr;
    const Rows rows = rows_.rows(c.gathers);
    const UpWeights weights{
        W1_.tensor(), halves() == 2 ? W1_up_.tensor() : tilemoe_tensor{}, {}, {}};
    const Adapter adapter = has_adapter ? Adapter{P_.tensor(), factor_.tensor()} : Adapter{};
    switch (c.gemm) {
      case Gemm::kUp:
        visit(UpProjection{.experts = &experts,
                           .rows = rows,
                           .X = source_.tensor(),
                           .weights = weights,
                           .H = out.wide.tensor(),
                           .A = out.A.tensor(),
                           .scratch = {},
                           .stream = nullptr,
                           .tuning = tuning,
                           .adapter = adapter});
        break;
      case Gemm::kDown:
        visit(DownProjection{.experts = &experts,
                             .rows = rows,
                             .A = source_.tensor(),
                             .W2 = W2_.tensor(),
                             .b2 = {},
                             .Y = out.wide.tensor(),
                             .scratch = {},
                             .stream = nullptr,
                             .tuning = tuning,
                             .adapter = adapter});
        break;
      case Gemm::kActivation:
        visit(ActivationGradient{.experts = &experts,
                                 .rows = rows,
                                 .dO = source_.tensor(),
                                 .W1 = W1_.tensor(),
                                 .W2 = W2_.tensor(),
                                 .H = H_.tensor(),
                                 .dH = out.wide.tensor(),
                                 .A_scaled = out.A.tensor(),
                                 .ds_partial = static_cast<float*>(out.ds.tensor().data),
                                 .scratch = {},
                                 .stream = nullptr,
                                 .tuning = tuning,
                                 .adapter = adapter});
        break;
      case Gemm::kInput:
        visit(InputGradient{.experts = &experts,
                            .rows = rows,
                            .dH = source_.tensor(),
                            .weights = weights,
                            .dX_rows = out.wide.tensor(),
                            .scratch = {},
                            .stream = nullptr,
                            .tuning = tuning,
                            .adapter = adapter});
        break;
    }
  }

  // ---- the operands as matrices: of rows of the source, experts, columns of the GEMM, and its sum
  double W1(int64_t e, int64_t h, int64_t k) const { return value_({e, h, k}, 1); }
  double W2(int64_t e, int64_t d, int64_t n) const { return value_({e, d, n}, 2); }
  double source(int64_t row, int64_t k) const { return value_({row, k, 0}, 3); }
  double P(int64_t row, int64_t q) const { return value_({row, q, 0}, 4); }
  double factor(int64_t e, int64_t column, int64_t q) const { return value_({e, column, q}, 5); }
  double H(int64_t row, int64_t h) const {
    const bool gate_of_swiglu = case_.activation == TILEMOE_SWIGLU && h < kN;
    return gate_of_swiglu && value_ == small ? 0 : value_({row, h, 0}, 6);
  }
  double weight(int64_t e, int64_t column, int64_t k) const {
    switch (case_.gemm) {
      case Gemm::kUp: return W1(e, column, k);
      case Gemm::kDown: return W2(e, column, k);
      case Gemm::kActivation: return W2(e, k, column);
      default: return W1(e, k, column);
    }
  }

  // [source, P] [weights, factor]^T: (M, columns).
  std::vector<float> multiply() const {
    const int64_t columns = case_.columns(), sum = case_.sum(), all = sum + case_.rank;
    std::vector<float> out(static_cast<size_t>(rows_.M * columns)), operand;
    for (int64_t row = 0, expert = -1; row < rows_.M; ++row) {
      if (rows_.expert_of(row) != expert) {
        expert = rows_.expert_of(row), operand.clear();
        for (int64_t k = 0; k < all; ++k)
          for (int64_t column = 0; column < columns; ++column)
            operand.push_back(static_cast<float>(k < sum ? weight(expert, column, k)
                                                         : factor(expert, column, k - sum)));
      }
      const int64_t from = rows_.source_of(row, case_.gathers_rows());
      const float* line = operand.data();
      for (int64_t k = 0; k < all; ++k, line += columns) {
        const auto x = static_cast<float>(k < sum ? source(from, k) : P(row, k - sum));
        float* const sums = out.data() + row * columns;
        for (int64_t column = 0; column < columns; ++column) sums[column] += x * line[column];
      }
    }
    return out;
  }

  const Case case_;
  const Value value_;
  const ExpertRows rows_;
  PlacedTensor W1_, W1_up_, W2_, source_, H_, P_, factor_;
  std::list<Outputs> outputs_;
};

}  // namespace tilemoe::test::adapter
