// Common code of the routing tests: logits of every kind, routings with guarded memory, and a naive
// reference that sorts everything.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/numbers.h"
#include "routing/order.h"
#include "tilemoe/layer.h"

namespace tilemoe {

// How GoogleTest prints a parameter.
inline void PrintTo(Scoring scoring, std::ostream* out) {
  *out << "Scoring" << static_cast<int>(scoring);
}
inline void PrintTo(Rounding rule, std::ostream* out) {
  *out << "Rule" << static_cast<int>(rule);
}

}  // namespace tilemoe

namespace tilemoe::routing_test {

constexpr Scoring kScorings[] = {Scoring::kSoftmaxOverChosen, Scoring::kSoftmaxOverAll,
                                 Scoring::kSoftmaxRenormalized, Scoring::kSigmoid,
                                 Scoring::kSigmoidRenormalized};
inline bool is_sigmoid(Scoring scoring) {
  return scoring == Scoring::kSigmoid || scoring == Scoring::kSigmoidRenormalized;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Memory for the library, aligned to 64 bytes and filled with a pattern; the pattern behind its end
// must not change.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes), lines_(bytes / sizeof(Line) + 3, Line{}) {
    std::memset(lines_.data(), kPattern, lines_.size() * sizeof(Line));
  }
  ~Guarded() { EXPECT_TRUE(intact()) << "something was written behind " << bytes_ << " bytes"; }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  void* data() { return lines_.data(); }
  size_t bytes() const { return bytes_; }
  bool intact() const {
    const auto* all = reinterpret_cast<const unsigned char*>(lines_.data());
    return std::all_of(all + bytes_, all + lines_.size() * sizeof(Line),
                       [](unsigned char byte) { return byte == kPattern; });
  }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  static constexpr unsigned char kPattern = 0xA5;
  size_t bytes_;
  std::vector<Line> lines_;
};

// A routing with its memory and workspace.
class Routed {
 public:
  explicit Routed(const RoutingSpec& spec)
      : memory_(spec.bytes()),
        workspace_(spec.workspace_bytes()),
        routing_(spec, memory_.data(), memory_.bytes()) {}

  Routing& routing() { return routing_; }
  const tilemoe_routing& get() const { return routing_; }
  void* workspace() { return workspace_.data(); }
  size_t workspace_bytes() const { return workspace_.bytes(); }

  void route_top_k(const ConstTensor& ids, const ConstTensor& scores) {
    routing_.from_top_k(ids, scores, workspace(), workspace_bytes());
  }
  void route_triples(const ConstTensor& tokens, const ConstTensor& experts,
                     const ConstTensor& scores) {
    routing_.from_triples(tokens, experts, scores, workspace(), workspace_bytes());
  }
  void round(const ConstTensor& logits, int64_t seed, int64_t step, const Tensor& counts = {}) {
    const bool random = routing_.spec.rounding == TILEMOE_ROUND_STOCHASTIC;
    routing_.from_logits({.logits = logits,
                          .seed = random ? ConstTensor(&seed, DType::kInt64, {1}) : ConstTensor(),
                          .step = random ? ConstTensor(&step, DType::kInt64, {1}) : ConstTensor(),
                          .expert_counts = counts,
                          .workspace = workspace(),
                          .workspace_bytes = workspace_bytes()});
  }
  void backward(Scoring scoring, const ConstTensor& logits, const ConstTensor& ds,
                const Tensor& dlogits, bool accumulate = false, float factor = 1) {
    router_backward({.scoring = scoring,
                     .routing = &routing_,
                     .logits = logits,
                     .ds = ds,
                     .dlogits = dlogits,
                     .accumulate = accumulate,
                     .workspace = workspace(),
                     .workspace_bytes = workspace_bytes(),
                     .routed_scaling_factor = factor});
  }

  int32_t rows() const { return routing_.offsets[routing_.spec.E]; }
  int32_t counter(int which) const { return routing_.counters[which]; }
  std::vector<int32_t> offsets() const {
    return {routing_.offsets, routing_.offsets + routing_.spec.E + 1};
  }
  std::vector<int32_t> row_tokens() const {
    return {routing_.row_token, routing_.row_token + rows()};
  }
  std::vector<float> row_scores() const {
    return {routing_.row_score, routing_.row_score + rows()};
  }
  std::vector<int32_t> pair_rows() const {
    return {routing_.pair_row, routing_.pair_row + routing_.spec.pairs};
  }
  std::vector<int32_t> token_offsets() const {
    return {routing_.token_offsets, routing_.token_offsets + routing_.spec.T + 1};
  }
  int32_t expert_of(int32_t row) const {
    int32_t e = 0;
    while (row >= routing_.offsets[e + 1]) ++e;
    return e;
  }

 private:
  Guarded memory_, workspace_;
  Routing routing_;
};

// The same bits, so that NaN equals NaN and 0 does not equal -0.
inline std::vector<int32_t> bits_of(const std::vector<float>& x) {
  std::vector<int32_t> bits(x.size());
  if (!x.empty()) std::memcpy(bits.data(), x.data(), x.size() * sizeof(float));
  return bits;
}

// ------------------------------------------------------------------ logits

enum class Logits { kNormal, kTies, kSpecial, kSkewed, kStriped };
inline const char* name(Logits kind) {
  switch (kind) {
    case Logits::kNormal: return "Normal";
    case Logits::kTies: return "Ties";
    case Logits::kSpecial: return "Special";
    case Logits::kSkewed: return "Skewed";
    case Logits::kStriped: return "Striped";
  }
  return "";
}
inline void PrintTo(Logits kind, std::ostream* out) {
  *out << name(kind);
}

// kTies: small integers, so that ties are everywhere. kSpecial: ties with NaN, infinities and both
// zeros. kSkewed: a few experts get most tokens. kStriped: every 32nd expert is better than others.
inline std::vector<float> make_logits(Logits kind, int64_t T, int64_t E, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(T * E));
  for (size_t i = 0; i < x.size(); ++i) {
    const auto e = static_cast<float>(static_cast<int64_t>(i) % E);
    switch (kind) {
      case Logits::kNormal: x[i] = normal(random); break;
      case Logits::kTies: x[i] = static_cast<float>(static_cast<int>(random() % 3) - 1); break;
      case Logits::kSkewed: x[i] = normal(random) - 3.f * e / static_cast<float>(E); break;
      case Logits::kStriped:
        x[i] = normal(random) + (static_cast<int64_t>(i) % E % 32 == 5 ? 9.f : 0.f);
        break;
      case Logits::kSpecial: {
        const float special[] = {kInfinity, -kInfinity, -kInfinity, -kInfinity, 0.f, -0.f};
        x[i] = random() % 4 == 0 ? special[random() % 6] : static_cast<float>(random() % 3);
        if (random() % (20 * static_cast<uint32_t>(E)) == 0) x[i] = kNaN;
        break;
      }
    }
  }
  return x;
}

// A (rows, columns) matrix as the library reads it: any dtype, rows `gap` elements further apart
// than they need, the gap filled with NaN.
class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t columns, int64_t gap = 0)
      : dtype_(dtype), rows_(rows), columns_(columns), stride_(columns + gap) {
    bytes_.assign(static_cast<size_t>(rows * stride_) * size_of(dtype) + 1, 0xFF);
  }
  Matrix(const std::vector<float>& values, DType dtype, int64_t rows, int64_t columns,
         int64_t gap = 0)
      : Matrix(dtype, rows, columns, gap) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) set(r, c, values[static_cast<size_t>(r * columns + c)]);
  }

  Tensor tensor() { return {bytes_.data(), dtype_, {rows_, columns_}, {stride_, 1}}; }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  void set(int64_t row, int64_t column, float value) {
    if (dtype_ == DType::kFloat32) {
      std::memcpy(at(row, column), &value, sizeof value);
    } else if (dtype_ == DType::kBFloat16) {
      BFloat16 half{};
      store(value, half);
      std::memcpy(at(row, column), &half, sizeof half);
    } else {
      Float16 half{};
      store(value, half);
      std::memcpy(at(row, column), &half, sizeof half);
    }
  }
  float get(int64_t row, int64_t column) {
    if (dtype_ == DType::kFloat32) {
      float value;
      std::memcpy(&value, at(row, column), sizeof value);
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, at(row, column), sizeof bits);
    return dtype_ == DType::kBFloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
  }
  // The stored values, (rows, columns).
  std::vector<float> values() {
    std::vector<float> all;
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < columns_; ++c) all.push_back(get(r, c));
    return all;
  }
  bool gaps_intact() {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = columns_; c < stride_; ++c)
        for (size_t b = 0; b < size_of(dtype_); ++b)
          if (at(r, c)[b] != 0xFF) return false;
    return true;
  }

 private:
  unsigned char* at(int64_t row, int64_t column) {
    return bytes_.data() + static_cast<size_t>(row * stride_ + column) * size_of(dtype_);
  }
  DType dtype_;
  int64_t rows_, columns_, stride_;
  std::vector<unsigned char> bytes_;
};

template <class Element>
constexpr DType dtype_of() {
  static_assert(std::is_same_v<Element, float> || std::is_integral_v<Element>);
  if (std::is_same_v<Element, float>) return DType::kFloat32;
  return sizeof(Element) == 4 ? DType::kInt32 : DType::kInt64;
}
template <class Element>
Tensor vector_of(std::vector<Element>& x) {
  return {x.data(), dtype_of<Element>(), {static_cast<int64_t>(x.size())}};
}
template <class Element>
ConstTensor vector_of(const std::vector<Element>& x) {
  return {x.data(), dtype_of<Element>(), {static_cast<int64_t>(x.size())}};
}

// --------------------------------------------------------------- reference

// Indices [0, values.size()) with the greatest value first, ties to the lower index, NaN last.
inline std::vector<int32_t> sorted_descending(const std::vector<float>& values) {
  std::vector<int32_t> ids(values.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    const float x = values[static_cast<size_t>(a)], y = values[static_cast<size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  return ids;
}

inline std::vector<float> row_of_logits(const std::vector<float>& logits, int64_t t, int64_t E) {
  return {logits.begin() + t * E, logits.begin() + (t + 1) * E};
}

inline bool has_nan(const std::vector<float>& x) {
  return std::any_of(x.begin(), x.end(), [](float each) { return std::isnan(each); });
}

// softmax over `x` in float64; the limit if logits are infinite.
inline std::vector<double> softmax64(const std::vector<float>& x) {
  std::vector<double> p(x.size());
  const double max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i)
    sum += p[i] = static_cast<double>(x[i]) == max ? 1.0 : std::exp(x[i] - max);
  for (double& each : p) each /= sum;
  return p;
}

inline double sigmoid64(float x) {
  return 1 / (1 + std::exp(-static_cast<double>(x)));
}

// p of one token as the documentation defines its bits: lanes of 32, added in halves.
inline std::vector<float> softmax_in_lanes(const std::vector<float>& x) {
  if (has_nan(x)) return std::vector<float>(x.size(), kNaN);
  const float max = *std::max_element(x.begin(), x.end());
  std::vector<float> p(x.size());
  std::vector<float> lanes(32, 0.f);
  for (size_t i = 0; i < x.size(); ++i) {
    p[i] = order::softmax_weight(x[i], max);
    lanes[i % 32] += p[i];
  }
  for (size_t half = 16; half > 0; half /= 2)
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  for (float& each : p) each /= lanes[0];
  return p;
}

// Puts the number of threads back after a test that changed it.
struct RestoreThreads {
  ~RestoreThreads() { tilemoe_set_num_threads(0); }
};

}  // namespace tilemoe::routing_test
