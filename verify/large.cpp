#include "large.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "number.h"
#include "random.h"

namespace tilemoe::verify {
namespace {

constexpr int64_t kHiddenTokens = 5, kHiddenExperts = 4;

// The place of number i of `count` among `size`: the first at the beginning, the last at the end.
int64_t spread(int64_t i, int64_t count, int64_t size) {
  return i * (size - 1) / (count - 1);
}
int64_t token_of(const Case& large, int64_t hidden) {
  return spread(hidden, kHiddenTokens, large.T);
}
int64_t expert_of(const Case& large, int64_t hidden) {
  return spread(hidden, kHiddenExperts, large.E);
}

Case hidden_case(const Case& large) {
  if (large.routing != RoutingKind::kGeneral || large.biases || large.E <= kHiddenExperts ||
      large.T < kHiddenTokens)
    throw std::logic_error("check_large: the case has no room for a hidden layer");
  Case small = large;
  small.T = kHiddenTokens, small.E = kHiddenExperts, small.K = 3;
  return small;
}

struct Triples {
  std::vector<int32_t> tokens, experts;
  std::vector<float> scores;
  std::vector<int64_t> hidden;  // places of the hidden layer's triples, in its order

  void add(int64_t token, int64_t expert, float score) {
    tokens.push_back(static_cast<int32_t>(token));
    experts.push_back(static_cast<int32_t>(expert));
    scores.push_back(score);
  }
  int64_t count() const { return std::ssize(tokens); }
};

Triples triples_of(const Case& large, const Inputs& small, uint64_t seed) {
  std::vector<int64_t> crowd;
  for (int64_t e = 0, hidden = 0; e < large.E; ++e)
    if (hidden < kHiddenExperts && e == expert_of(large, hidden))
      ++hidden;
    else
      crowd.push_back(e);
  Random random(seed, 77);
  Triples triples;
  size_t next = 0;
  for (int64_t t = 0, hidden = 0; t < large.T; ++t) {
    if (hidden < kHiddenTokens && t == token_of(large, hidden)) {
      for (; next < small.tokens.size() && small.tokens[next] == hidden; ++next) {
        triples.hidden.push_back(triples.count());
        triples.add(t, expert_of(large, small.experts[next]), small.scores[next]);
      }
      ++hidden;
      continue;
    }
    for (int64_t k = 0; k < large.K; ++k)
      triples.add(t, crowd[static_cast<size_t>(random.below(std::ssize(crowd)))],
                  static_cast<float>(random.uniform()));
  }
  return triples;
}

// Rows of a tensor in the device's memory; a row belongs to one token or expert.
class Rows {
 public:
  Rows(Memory& memory, DType dtype, int64_t rows, int64_t width)
      : memory_(memory),
        dtype_(dtype),
        width_(width),
        bytes_(size_of(dtype) * static_cast<size_t>(rows * width)),
        data_(memory.allocate(std::max(bytes_, size_t{1}))) {}
  ~Rows() { memory_.release(data_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Tensor view(std::initializer_list<int64_t> shape) const { return Tensor(data_, dtype_, shape); }

  // deviation * N(0, 1): one random block repeated. Its length is prime, so that no two rows begin
  // at the same place of it.
  void fill_with_crowd(double deviation, uint64_t stream) {
    constexpr int64_t kBlock = 4194301;
    Random random(99, stream);
    std::vector<std::byte> block(size_of(dtype_) * static_cast<size_t>(kBlock));
    for (int64_t i = 0; i < kBlock; ++i)
      store(dtype_, block.data(), i, deviation * random.normal());
    for (size_t at = 0; at < bytes_; at += block.size())
      memory_.copy_in(static_cast<std::byte*>(data_) + at, block.data(),
                      std::min(block.size(), bytes_ - at));
  }
  void write_row(int64_t row, const float* values) {
    std::vector<std::byte> encoded(row_bytes());
    for (int64_t i = 0; i < width_; ++i)
      store(dtype_, encoded.data(), i, static_cast<double>(values[i]));
    memory_.copy_in(place(row), encoded.data(), encoded.size());
  }
  // NaN in every floating type.
  void poison_row(int64_t row) {
    const std::vector<std::byte> ones(row_bytes(), std::byte{0xff});
    memory_.copy_in(place(row), ones.data(), ones.size());
  }
  void read_row(int64_t row, std::vector<float>& to) const {
    std::vector<std::byte> encoded(row_bytes());
    memory_.copy_out(encoded.data(), place(row), encoded.size());
    for (int64_t i = 0; i < width_; ++i)
      to.push_back(static_cast<float>(load(dtype_, encoded.data(), i)));
  }

 private:
  size_t row_bytes() const { return size_of(dtype_) * static_cast<size_t>(width_); }
  std::byte* place(int64_t row) const {
    return static_cast<std::byte*>(data_) + static_cast<size_t>(row) * row_bytes();
  }

  Memory& memory_;
  DType dtype_;
  int64_t width_;
  size_t bytes_;
  void* data_;
};

class LargeLayer {
 public:
  LargeLayer(const Case& large, const Inputs& small, uint64_t seed, Memory& memory, Passes passes)
      : case_(large),
        memory_(memory),
        triples_(triples_of(large, small, seed)),
        with_backward_(passes == Passes::kAll),
        experts_(large.experts(memory.device())),
        spec_(large.spec(triples_.count(), memory.device())),
        X_(memory, large.dtype, large.T, large.d),
        O_(memory, large.dtype, large.T, large.d),
        dO_(memory, large.dtype, large.T, large.d),
        dX_(memory, large.dtype, large.T, large.d),
        W1_(memory, large.dtype, large.E, large.h_width() * large.d),
        W2_(memory, large.dtype, large.E, large.d * large.n),
        dW1_(memory, large.dtype, with_backward_ ? large.E : 0, large.h_width() * large.d),
        dW2_(memory, large.dtype, with_backward_ ? large.E : 0, large.d * large.n),
        H_(memory, large.dtype, spec_.bound(), large.h_width()),
        ds_(memory, DType::kFloat32, triples_.count(), 1) {
    X_.fill_with_crowd(1, 1), dO_.fill_with_crowd(1, 2);
    W1_.fill_with_crowd(1 / std::sqrt(static_cast<double>(large.d)), 3);
    W2_.fill_with_crowd(1 / std::sqrt(static_cast<double>(large.n)), 4);
    const auto part = [](const std::vector<float>& values, int64_t row, int64_t rows) {
      return values.data() + row * (std::ssize(values) / rows);
    };
    for (int64_t i = 0; i < kHiddenTokens; ++i) {
      const int64_t t = token_of(large, i);
      X_.write_row(t, part(small.X, i, kHiddenTokens));
      dO_.write_row(t, part(small.dO, i, kHiddenTokens));
      O_.poison_row(t), dX_.poison_row(t);
    }
    for (int64_t i = 0; i < kHiddenExperts; ++i) {
      const int64_t e = expert_of(large, i);
      W1_.write_row(e, part(small.weights.W1, i, kHiddenExperts));
      W2_.write_row(e, part(small.weights.W2, i, kHiddenExperts));
      if (with_backward_) dW1_.poison_row(e), dW2_.poison_row(e);
    }
    for (const int64_t pair : triples_.hidden) ds_.poison_row(pair);
  }

  void run() {
    const int64_t T = case_.T, d = case_.d, n = case_.n, E = case_.E, h = case_.h_width();
    const int64_t pairs = triples_.count();
    Rows tokens(memory_, DType::kInt32, pairs, 1), experts(memory_, DType::kInt32, pairs, 1);
    Rows scores(memory_, DType::kFloat32, pairs, 1);
    memory_.copy_in(tokens.data(), triples_.tokens.data(), tokens.bytes());
    memory_.copy_in(experts.data(), triples_.experts.data(), experts.bytes());
    memory_.copy_in(scores.data(), triples_.scores.data(), scores.bytes());
    const Rows arrays = bytes(spec_.bytes());
    const size_t needed =
        std::max({spec_.workspace_bytes(), experts_.workspace_bytes(spec_, Pass::kForward),
                  experts_.workspace_bytes(spec_, BackwardMode::kWhole)});
    const Rows workspace = bytes(needed);
    Routing routing(spec_, arrays.data(), arrays.bytes());
    routing.from_triples(tokens.view({pairs}), experts.view({pairs}), scores.view({pairs}),
                         workspace.data(), workspace.bytes());
    Saved saved(H_.view({spec_.bound(), h}));
    Weights weights;
    weights.W1 = W1_.view({E, h, d}), weights.W2 = W2_.view({E, d, n});
    ForwardArgs forward;
    forward.routing = &routing, forward.weights = weights, forward.saved = &saved;
    forward.X = X_.view({T, d}), forward.O = O_.view({T, d});
    forward.workspace = workspace.data(), forward.workspace_bytes = workspace.bytes();
    experts_.forward(forward);
    computed_[kO] = rows_of_tokens(O_);  // waits
    if (!with_backward_) return;
    BackwardArgs backward;
    backward.routing = &routing, backward.weights = weights, backward.saved = &saved;
    backward.X = X_.view({T, d}), backward.dO = dO_.view({T, d}), backward.dX = dX_.view({T, d});
    backward.dweights.W1 = dW1_.view({E, h, d}), backward.dweights.W2 = dW2_.view({E, d, n});
    backward.ds = ds_.view({pairs});
    backward.workspace = workspace.data(), backward.workspace_bytes = workspace.bytes();
    experts_.backward(backward);
    computed_[kDX] = rows_of_tokens(dX_);
    computed_[kDW1] = rows_of_experts(dW1_), computed_[kDW2] = rows_of_experts(dW2_);
    for (const int64_t pair : triples_.hidden) ds_.read_row(pair, computed_[kDs]);
  }

  // The outputs of the hidden layer.
  const Computed& computed() const { return computed_; }

 private:
  Rows bytes(size_t count) const {
    return {memory_, DType::kFloat32, static_cast<int64_t>((count + 3) / 4), 1};
  }
  std::vector<float> rows_of_tokens(const Rows& from) const {
    std::vector<float> rows;
    for (int64_t i = 0; i < kHiddenTokens; ++i) from.read_row(token_of(case_, i), rows);
    return rows;
  }
  std::vector<float> rows_of_experts(const Rows& from) const {
    std::vector<float> rows;
    for (int64_t i = 0; i < kHiddenExperts; ++i) from.read_row(expert_of(case_, i), rows);
    return rows;
  }

  const Case& case_;
  Memory& memory_;
  Triples triples_;
  bool with_backward_;
  Experts experts_;
  RoutingSpec spec_;
  Rows X_, O_, dO_, dX_, W1_, W2_, dW1_, dW2_, H_, ds_;
  Computed computed_;
};

std::vector<Pair> pairs_of(const Inputs& small) {
  std::vector<Pair> pairs;
  for (size_t p = 0; p < small.tokens.size(); ++p)
    pairs.push_back({.index = static_cast<int64_t>(p),
                     .row = static_cast<int64_t>(p),
                     .token = small.tokens[p],
                     .expert = small.experts[p],
                     .score = small.scores[p]});
  return pairs;
}

}  // namespace

Report check_large(const Case& large, uint64_t seed, Memory& memory, Passes passes) {
  const Inputs small = make_inputs(hidden_case(large), seed);
  LargeLayer layer(large, small, seed, memory, passes);
  layer.run();
  return judge(small, pairs_of(small), layer.computed(), passes);
}

}  // namespace tilemoe::verify
