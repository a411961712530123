#include "reference.h"

#include <algorithm>
#include <thread>

#include "activation.h"
#include "fp8.h"
#include "number.h"

namespace tilemoe::verify {
namespace {

// Experts are dealt to this number of threads on every machine, each thread with separate sums, so
// that results do not depend on the machine. With fewer experts, parts of their rows are dealt.
constexpr size_t kThreads = 12;
// Rows that an expert computes together; bounds the memory of a case with very many rows.
constexpr size_t kBlockRows = 256;

// Row-major.
template <class Real>
struct Matrix {
  Matrix(size_t row_count, size_t column_count)
      : rows(row_count), columns(column_count), values(row_count * column_count) {}
  Real* row(size_t i) { return values.data() + i * columns; }
  const Real* row(size_t i) const { return values.data() + i * columns; }

  size_t rows, columns;
  std::vector<Real> values;
};

// The index of the i-th term of a sum of `count` terms.
size_t term(SumOrder order, size_t i, size_t count) {
  return order == SumOrder::kAscending ? i : count - 1 - i;
}

template <class Real, class Element>
void add_scaled(Real* to, Real scale, const Element* from, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] += scale * static_cast<Real>(from[i]);
}

template <class Real, class Element>
Real dot(const Real* a, const Element* b, size_t count, SumOrder order) {
  Real sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t k = term(order, i, count);
    sum += a[k] * static_cast<Real>(b[k]);
  }
  return sum;
}

// A B^T, B (columns, A.columns). Every sum runs in order; the compiler may vectorize over rows.
template <class Real, class Element>
Matrix<Real> times_transposed(const Matrix<Real>& A, const Element* B, size_t columns,
                              SumOrder order) {
  Matrix<Real> A_transposed(A.columns, A.rows), C(A.rows, columns);
  for (size_t i = 0; i < A.rows; ++i)
    for (size_t k = 0; k < A.columns; ++k) A_transposed.row(k)[i] = A.row(i)[k];
  std::vector<Real> column(A.rows);
  for (size_t j = 0; j < columns; ++j) {
    std::fill(column.begin(), column.end(), Real{0});
    for (size_t i = 0; i < A.columns; ++i) {
      const size_t k = term(order, i, A.columns);
      add_scaled(column.data(), static_cast<Real>(B[j * A.columns + k]), A_transposed.row(k),
                 A.rows);
    }
    for (size_t i = 0; i < A.rows; ++i) C.row(i)[j] = column[i];
  }
  return C;
}

// A B, B (A.columns, columns)
template <class Real, class Element>
Matrix<Real> times(const Matrix<Real>& A, const Element* B, size_t columns, SumOrder order) {
  Matrix<Real> C(A.rows, columns);
  for (size_t row = 0; row < A.rows; ++row)
    for (size_t i = 0; i < A.columns; ++i) {
      const size_t k = term(order, i, A.columns);
      add_scaled(C.row(row), A.row(row)[k], B + k * columns, columns);
    }
  return C;
}

// C += A^T B, C (A.columns, B.columns)
template <class Real>
void add_transposed_times(Real* C, const Matrix<Real>& A, const Matrix<Real>& B, SumOrder order) {
  for (size_t row = 0; row < A.rows; ++row) {
    const size_t r = term(order, row, A.rows);
    for (size_t i = 0; i < A.columns; ++i)
      add_scaled(C + i * B.columns, A.row(r)[i], B.row(r), B.columns);
  }
}

template <class Real>
void add(Matrix<Real>& to, const Matrix<Real>& from) {
  add_scaled(to.values.data(), Real{1}, from.values.data(), to.values.size());
}

template <class Real>
class Evaluation {
 public:
  Evaluation(const Inputs& inputs, const std::vector<Pair>& pairs, bool rounds, SumOrder order)
      : in_(inputs),
        case_(inputs.test_case),
        rounds_(rounds),
        order_(order),
        d_(static_cast<size_t>(case_.d)),
        n_(static_cast<size_t>(case_.n)),
        h_(static_cast<size_t>(case_.h_width())),
        rank_1_(static_cast<size_t>(case_.lora.rank_1())),
        rank_2_(static_cast<size_t>(case_.lora.rank_2())),
        experts_(static_cast<size_t>(case_.E)) {
    const size_t E = experts_.size();
    int64_t rows = 0;
    for (const Pair& pair : pairs) {
      experts_[static_cast<size_t>(pair.expert)].push_back(pair);
      rows = std::max(rows, pair.row + 1);
    }
    allocate(kH, wanted(case_, kH) ? static_cast<size_t>(rows) * h_ : 0);
    allocate(kDs, static_cast<size_t>(inputs.pairs()));
    parts_ = E < kThreads ? (kThreads + E - 1) / E : 1;
    allocate(kDW1, parts_ * E * h_ * d_);
    allocate(kDW2, parts_ * E * d_ * n_);
    allocate(kDb1, case_.biases ? parts_ * E * h_ : 0);
    allocate(kDb2, case_.biases ? parts_ * E * d_ : 0);
    allocate(kDA1, parts_ * E * rank_1_ * d_);
    allocate(kDB1, parts_ * E * h_ * rank_1_);
    allocate(kDA2, parts_ * E * rank_2_ * n_);
    allocate(kDB2, parts_ * E * d_ * rank_2_);
    A1_ = factor(inputs.lora.A1, Real{1}), B1_ = factor(inputs.lora.B1, scale_1());
    A2_ = factor(inputs.lora.A2, Real{1}), B2_ = factor(inputs.lora.B2, scale_2());
  }

  Results run() {
    std::vector<Sums> sums(kThreads, Sums(inputs_size()));
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([this, thread, &sums] {
        for (size_t i = thread; i < parts_ * experts_.size(); i += kThreads)
          part_of_expert(i / experts_.size(), i % experts_.size(), sums[thread]);
      });
    for (std::thread& thread : threads) thread.join();

    combine(kO, in_.O_addend, sums, &Sums::O);
    combine(kDX, in_.dX_addend, sums, &Sums::dX);
    finish_weights(kDW1, in_.dW_before.W1);
    finish_weights(kDW2, in_.dW_before.W2);
    finish_weights(kDb1, in_.dW_before.b1);
    finish_weights(kDb2, in_.dW_before.b2);
    finish_weights(kDA1, in_.dlora_before.A1);
    finish_weights(kDB1, in_.dlora_before.B1);
    finish_weights(kDA2, in_.dlora_before.A2);
    finish_weights(kDB2, in_.dlora_before.B2);
    leave_out_absent_factors();

    Results results;
    for (size_t output = 0; output < kOutputs; ++output)
      if (wanted(case_, static_cast<Output>(output)))
        results[output].assign(values_[output].begin(), values_[output].end());
    return results;
  }

 private:
  // Sums over a token's pairs.
  struct Sums {
    explicit Sums(size_t size) : O(size), dX(size) {}
    std::vector<Real> O, dX;  // (outer_rows, d)
  };

  size_t inputs_size() const { return in_.X.size(); }
  void allocate(Output output, size_t size) { values_[output].resize(size); }

  Real stored(Real value, DType dtype) const {
    return rounds_ ? static_cast<Real>(round_to(dtype, static_cast<double>(value))) : value;
  }
  void store(Matrix<Real>& matrix) const {
    for (Real& value : matrix.values) value = stored(value, case_.dtype);
  }

  // The fp8 recipe: rows, or each of their parts, as its GEMMs read them.
  void store_codes(Matrix<Real>& matrix, size_t parts = 1) const {
    const size_t width = matrix.columns / parts;
    for (size_t r = 0; rounds_ && r < matrix.rows; ++r)
      for (size_t p = 0; p < parts; ++p)
        round_to_fp8(matrix.row(r) + p * width, width, case_.float_scales);
  }

  Real scale_1() const { return static_cast<Real>(case_.lora.scale_1); }
  Real scale_2() const { return static_cast<Real>(case_.lora.scale_2); }
  // A factor as the GEMMs read it.
  std::vector<Real> factor(const std::vector<float>& values, Real scale) const {
    std::vector<Real> packed(values.begin(), values.end());
    for (Real& value : packed) value = stored(scale * value, case_.dtype);
    return packed;
  }
  // Expert e's matrix of a factor.
  const Real* of(const std::vector<Real>& factor, size_t e) const {
    return factor.data() + e * (factor.size() / experts_.size());
  }

  Matrix<Real> gather(const std::vector<float>& from, const Pair* pairs, size_t count) const {
    Matrix<Real> rows(count, d_);
    for (size_t r = 0; r < count; ++r)
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(pairs[r].token) * case_.d, d_,
                  rows.row(r));
    return rows;
  }

  void add_bias(Matrix<Real>& rows, const std::vector<float>& bias, size_t e) const {
    if (bias.empty()) return;
    for (size_t r = 0; r < rows.rows; ++r)
      add_scaled(rows.row(r), Real{1}, bias.data() + e * rows.columns, rows.columns);
  }

  void part_of_expert(size_t part, size_t e, Sums& sums) {
    const std::vector<Pair>& pairs = experts_[e];
    for (size_t first = part * kBlockRows; first < pairs.size(); first += parts_ * kBlockRows)
      block(part, e, pairs.data() + first, std::min(kBlockRows, pairs.size() - first), sums);
  }

  // This part's sum over rows of expert e, in values_[output], (parts, E, size).
  Real* gradient(Output output, size_t part, size_t e, size_t size) {
    return values_[output].data() + (part * experts_.size() + e) * size;
  }

  ActivationValue<Real> activate_at(const Matrix<Real>& H, size_t r, size_t j) const {
    return activate<Real>(case_, H.row(r)[j], case_.gated() ? H.row(r)[n_ + j] : Real{0});
  }

  // Forward and backward of some rows of an expert.
  void block(size_t part, size_t e, const Pair* pairs, size_t count, Sums& sums) {
    const float* W1 = in_.weights.W1.data() + e * h_ * d_;  // (h, d)
    const float* W2 = in_.weights.W2.data() + e * d_ * n_;  // (d, n)

    // P1 = X A1^T, H = X W1^T + P1 (scale_1 B1)^T + b1, A = act(H)
    const Matrix<Real> X = gather(in_.X, pairs, count);
    const bool fp8 = case_.recipe != Recipe::kBf16, fp8_backward = case_.recipe == Recipe::kFp8;
    Matrix<Real> X_rounded = X;
    if (fp8) store_codes(X_rounded);
    Matrix<Real> H = times_transposed(X_rounded, W1, h_, order_);
    Matrix<Real> P1 = times_transposed(X, of(A1_, e), rank_1_, order_);
    store(P1);
    add(H, times_transposed(P1, of(B1_, e), h_, order_));
    add_bias(H, in_.weights.b1, e);
    Matrix<Real> A(count, n_);
    for (size_t r = 0; r < count; ++r)
      for (size_t j = 0; j < n_; ++j) A.row(r)[j] = activate_at(H, r, j).A;
    Matrix<Real> A_of_adapter = A;
    store(A_of_adapter);
    fp8 ? store_codes(A) : store(A);
    if (case_.format_H == Format::kFp8) store_codes(H, 2);
    store(H);
    for (size_t r = 0; r < count && wanted(case_, kH); ++r)
      std::copy_n(H.row(r), h_, values_[kH].data() + static_cast<size_t>(pairs[r].row) * h_);

    // P2 = A A2^T, Y = A W2^T + P2 (scale_2 B2)^T + b2, O_t += s Y
    Matrix<Real> Y = times_transposed(A, W2, d_, order_);
    Matrix<Real> P2 = times_transposed(A_of_adapter, of(A2_, e), rank_2_, order_);
    store(P2);
    add(Y, times_transposed(P2, of(B2_, e), d_, order_));
    add_bias(Y, in_.weights.b2, e);
    store(Y);
    for (size_t r = 0; r < count; ++r)
      add_scaled(sums.O.data() + static_cast<size_t>(pairs[r].token) * d_, score(pairs[r]),
                 Y.row(r), d_);

    // Q2 = dO scale_2 B2, dA' = dO W2 + Q2 A2; A = act(H) again, from the stored H
    const Matrix<Real> dO = gather(in_.dO, pairs, count);
    Matrix<Real> dO_rounded = dO;
    if (fp8_backward) store_codes(dO_rounded);
    Matrix<Real> dA = times(dO_rounded, W2, n_, order_);
    Matrix<Real> Q2 = times(dO, of(B2_, e), rank_2_, order_);
    store(Q2);
    add(dA, times(Q2, of(A2_, e), n_, order_));
    Matrix<Real> dH(count, h_);
    Matrix<Real> A_scaled(count, n_);
    for (size_t r = 0; r < count; ++r) {
      const Real s = score(pairs[r]);
      Real ds = 0;
      for (size_t i = 0; i < n_; ++i) {
        const size_t j = term(order_, i, n_);
        const ActivationValue<Real> act = activate_at(H, r, j);
        ds += dA.row(r)[j] * act.A;
        A_scaled.row(r)[j] = s * act.A;
        dH.row(r)[j] = s * dA.row(r)[j] * act.dgate;
        if (case_.gated()) dH.row(r)[n_ + j] = s * dA.row(r)[j] * act.dup;
      }
      if (case_.biases) ds += dot(dO.row(r), in_.weights.b2.data() + e * d_, d_, order_);
      values_[kDs][static_cast<size_t>(pairs[r].index)] = ds;
    }
    store(dH);
    store(A_scaled);

    // dW2 = dO^T A', Q1 = dH scale_1 B1, dX~ = dH W1 + Q1 A1, dX_t += dX~, dW1 = dH^T X
    add_transposed_times(gradient(kDW2, part, e, d_ * n_), dO, A_scaled, order_);
    Matrix<Real> dH_rounded = dH;
    if (fp8_backward) store_codes(dH_rounded, 2);
    Matrix<Real> dX = times(dH_rounded, W1, d_, order_);
    Matrix<Real> Q1 = times(dH, of(B1_, e), rank_1_, order_);
    store(Q1);
    add(dX, times(Q1, of(A1_, e), d_, order_));
    store(dX);
    for (size_t r = 0; r < count; ++r)
      add_scaled(sums.dX.data() + static_cast<size_t>(pairs[r].token) * d_, Real{1}, dX.row(r), d_);
    add_transposed_times(gradient(kDW1, part, e, h_ * d_), dH, X, order_);

    // dA1 = Q1^T X, dB1 = dH^T (scale_1 P1), dA2 = Q2^T A', dB2 = dO^T (scale_2 s P2)
    for (size_t r = 0; r < count; ++r) {
      for (size_t j = 0; j < rank_1_; ++j) P1.row(r)[j] *= scale_1();
      for (size_t j = 0; j < rank_2_; ++j) P2.row(r)[j] *= scale_2() * score(pairs[r]);
    }
    store(P1), store(P2);
    add_transposed_times(gradient(kDA1, part, e, rank_1_ * d_), Q1, X, order_);
    add_transposed_times(gradient(kDB1, part, e, h_ * rank_1_), dH, P1, order_);
    add_transposed_times(gradient(kDA2, part, e, rank_2_ * n_), Q2, A_scaled, order_);
    add_transposed_times(gradient(kDB2, part, e, d_ * rank_2_), dO, P2, order_);
    if (!case_.biases) return;
    for (size_t i = 0; i < count; ++i) {
      const size_t r = term(order_, i, count);
      add_scaled(gradient(kDb1, part, e, h_), Real{1}, dH.row(r), h_);
      add_scaled(gradient(kDb2, part, e, d_), score(pairs[r]), dO.row(r), d_);
    }
  }

  static Real score(const Pair& pair) { return static_cast<Real>(pair.score); }

  // Grouped routing: the addend's rows past the last row are NaN and not part of the sum.
  void combine(Output output, const std::vector<float>& addend, const std::vector<Sums>& sums,
               std::vector<Real> Sums::*sum) {
    std::vector<Real>& total = values_[output];
    total.assign(inputs_size(), 0);
    const size_t given = inputs_size() - static_cast<size_t>(case_.spare_rows) * d_;
    if (!addend.empty()) std::copy_n(addend.begin(), given, total.begin());
    for (const Sums& part : sums) add_scaled(total.data(), Real{1}, (part.*sum).data(), given);
    for (Real& value : total) value = stored(value, case_.dtype);
  }

  void finish_weights(Output output, const std::vector<float>& before) {
    std::vector<Real>& sums = values_[output];
    const size_t size = sums.size() / parts_;
    for (size_t part = 1; part < parts_; ++part)
      add_scaled(sums.data(), Real{1}, sums.data() + part * size, size);
    sums.resize(size);
    if (!before.empty()) add_scaled(sums.data(), Real{1}, before.data(), before.size());
    for (Real& value : sums) value = stored(value, case_.dW_dtype());
  }

  // W1's adapters are apart when split: a row of B1 has the columns of its own adapter.
  void leave_out_absent_factors() {
    std::vector<Real>& dB1 = values_[kDB1];
    for (size_t i = 0; i < dB1.size(); ++i) {
      const auto row = static_cast<int64_t>(i / rank_1_ % h_);
      if (!has_factor(case_, row, static_cast<int64_t>(i % rank_1_))) dB1[i] = 0;
    }
  }

  const Inputs& in_;
  const Case& case_;
  bool rounds_;
  SumOrder order_;
  size_t d_, n_, h_, rank_1_, rank_2_;
  size_t parts_;  // parts of an expert's rows, with separate sums
  std::vector<std::vector<Pair>> experts_;
  std::vector<Real> A1_, B1_, A2_, B2_;  // B times its scale
  std::vector<Real> values_[kOutputs];
};

}  // namespace

const char* output_name(Output output) {
  constexpr const char* kNames[kOutputs] = {"H",   "O",   "dX",  "ds",  "dW1", "dW2",
                                            "db1", "db2", "dA1", "dB1", "dA2", "dB2"};
  return kNames[output];
}

bool of_forward(Output output) {
  return output == kH || output == kO;
}

bool wanted(const Case& test_case, Output output) {
  const Gradients& gradients = test_case.wanted;
  switch (output) {
    case kH: return !test_case.huge;
    case kO: return true;
    case kDX: return gradients.dX;
    case kDs: return gradients.ds;
    case kDW1: return gradients.dW1;
    case kDW2: return gradients.dW2;
    case kDb1: return gradients.db1 && test_case.biases;
    case kDb2: return gradients.db2 && test_case.biases;
    case kDA1:
    case kDB1: return gradients.lora_1 && test_case.lora.rank_1() > 0;
    case kDA2:
    case kDB2: return gradients.lora_2 && test_case.lora.rank_2() > 0;
    case kOutputs: break;
  }
  return false;
}

int64_t row_width(const Case& test_case, Output output) {
  constexpr int64_t kPairsInARow = 64;
  switch (output) {
    case kH:
    case kDb1: return test_case.h_width();
    case kDW2:
    case kDA2: return test_case.n;
    case kDB1: return test_case.lora.rank_1();
    case kDB2: return test_case.lora.rank_2();
    case kDs: return kPairsInARow;
    case kO:
    case kDX:
    case kDW1:
    case kDb2:
    case kDA1:
    case kOutputs: break;
  }
  return test_case.d;
}

Results evaluate(const Inputs& inputs, const std::vector<Pair>& pairs, Precision precision,
                 SumOrder order) {
  if (precision == Precision::kFloat32) return Evaluation<float>(inputs, pairs, false, order).run();
  return Evaluation<double>(inputs, pairs, precision == Precision::kRounded, order).run();
}

}  // namespace tilemoe::verify
