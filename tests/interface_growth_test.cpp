// Callers of other versions through every entry, on the CPU: an older one, whose structs end where
// a page begins that nobody may touch, and a newer one, whose structs have a field more.
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>

#include "arguments_support.h"
#include "check.h"
#include "fuzz_memory.h"

namespace tilemoe::arguments {
namespace {

constexpr int64_t T = 7, d = 24, n = 16, E = 5, K = 3;

void require(tilemoe_status status) {
  if (status != TILEMOE_SUCCESS) throw std::runtime_error(tilemoe_last_error());
}

// Makes a struct of this version that of another.
class Caller {
 public:
  virtual ~Caller() = default;
  template <class Struct>
  Struct* make(const Struct& today, size_t least = kLeastBytes<Struct>) {
    return reinterpret_cast<Struct*>(place(&today, sizeof(Struct), least));
  }

 protected:
  virtual void* place(const void* today, size_t bytes, size_t least) = 0;
};

class Older final : public Caller {
  void* place(const void* today, size_t, size_t least) override {
    slabs_.push_back(std::make_unique<fuzz::Slab>(least));
    unsigned char* const at = slabs_.back()->place(least, 8, true);
    std::memcpy(at, today, least);
    const uint64_t size = least;
    std::memcpy(at, &size, sizeof size);
    return at;
  }
  std::vector<std::unique_ptr<fuzz::Slab>> slabs_;
};

// With `added` bytes more, all of them `value`, between pages as above.
class Newer final : public Caller {
 public:
  explicit Newer(size_t added, unsigned char value = 0) : added_(added), value_(value) {}

 private:
  void* place(const void* today, size_t bytes, size_t) override {
    const uint64_t size = bytes + added_;
    slabs_.push_back(std::make_unique<fuzz::Slab>(size));
    unsigned char* const at = slabs_.back()->place(size, 8, true);
    std::memcpy(at, today, bytes);
    std::memset(at + bytes, value_, added_);
    std::memcpy(at, &size, sizeof size);
    return at;
  }
  size_t added_;
  unsigned char value_;
  std::vector<std::unique_ptr<fuzz::Slab>> slabs_;
};

class Today final : public Caller {
  void* place(const void* today, size_t bytes, size_t) override {
    memory_.emplace_back((bytes + 7) / 8);
    std::memcpy(memory_.back().data(), today, bytes);
    return memory_.back().data();
  }
  std::vector<std::vector<uint64_t>> memory_;
};

// Zeroed, on 16 bytes; workspaces are larger than an Arena.
class Memory {
 public:
  void* take(size_t bytes) {
    blocks_.emplace_back(bytes / sizeof(std::max_align_t) + 1);
    return blocks_.back().data();
  }

 private:
  std::vector<std::vector<std::max_align_t>> blocks_;
};

template <class Struct>
Struct sized() {
  Struct value{};
  value.struct_size = sizeof value;
  return value;
}

// A layer through every entry, by structs of the caller's.
class LayerRun {
 public:
  explicit LayerRun(Caller& caller) : caller_(caller) {
    ids_ = fresh(TILEMOE_INT32, {T, K}), scores_ = filled({T, K});
    logits_ = filled({T, E}), counts_ = fresh(TILEMOE_INT32, {E});
  }

  // Everything that was written, sizes included.
  std::vector<float> all() {
    choose();
    token_routing();
    top_k_routing();
    layer();
    router();
    rounded_routing();
    general_routing();
    grouped_routing();
    losses();
    sums_of_rows();
    return std::move(seen_);
  }

 private:
  tilemoe_tensor fresh(tilemoe_dtype dtype, const std::vector<int64_t>& shape) {
    const int64_t count =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    return tensor(memory_.take(static_cast<size_t>(count) * tilemoe_dtype_size(dtype)), dtype,
                  shape);
  }
  tilemoe_tensor filled(const std::vector<int64_t>& shape) {
    const tilemoe_tensor view = fresh(TILEMOE_FLOAT32, shape);
    for (int64_t i = 0; i < elements(view); ++i)
      static_cast<float*>(view.data)[i] = static_cast<float>((7 * i + ++salt_) % 17 - 8) / 8;
    return view;
  }
  static int64_t elements(const tilemoe_tensor& view) {
    return std::accumulate(view.shape, view.shape + view.ndim, int64_t{1}, std::multiplies<>());
  }
  void see(const tilemoe_tensor& view) {
    for (int64_t i = 0; i < elements(view); ++i)
      seen_.push_back(view.dtype == TILEMOE_FLOAT32
                          ? static_cast<const float*>(view.data)[i]
                          : static_cast<float>(static_cast<const int32_t*>(view.data)[i]));
  }
  void see(size_t number) { seen_.push_back(static_cast<float>(number)); }

  tilemoe_routing_spec spec(tilemoe_routing_kind kind) const {
    auto value = sized<tilemoe_routing_spec>();
    value.kind = kind, value.E = E;
    if (kind != TILEMOE_ROUTING_GROUPED) value.T = T;
    if (kind == TILEMOE_ROUTING_TOP_K || kind == TILEMOE_ROUTING_ROUNDED) value.K = K;
    if (kind == TILEMOE_ROUTING_GENERAL) value.pairs = T;
    if (kind == TILEMOE_ROUTING_GROUPED) value.capacity = T;
    if (kind == TILEMOE_ROUTING_ROUNDED) value.m = 2;
    return value;
  }
  // `spec_` and a bound routing of it. What rounds is in the part of the spec that may be left out;
  // who rounds may still know of no groups.
  tilemoe_routing* bind(tilemoe_routing_kind kind) {
    const bool rounds = kind == TILEMOE_ROUTING_ROUNDED;
    const size_t spec_bytes =
        rounds ? offsetof(tilemoe_routing_spec, round_tokens) : kLeastBytes<tilemoe_routing_spec>;
    spec_ = caller_.make(spec(kind), spec_bytes);
    int64_t capacity = 0;
    require(tilemoe_routing_capacity(spec_, &capacity));
    see(static_cast<size_t>(capacity));
    size_t bytes = 0;
    require(tilemoe_routing_bytes(spec_, &bytes));
    see(bytes);
    tilemoe_routing* const routing =
        caller_.make(sized<tilemoe_routing>(), offsetof(tilemoe_routing, spec) + spec_bytes);
    require(tilemoe_routing_bind(spec_, memory_.take(bytes), bytes, routing));
    require(tilemoe_routing_workspace_bytes(spec_, &workspace_bytes_));
    see(workspace_bytes_);
    workspace_ = memory_.take(workspace_bytes_);
    return routing;
  }
  template <class Args>
  Args with_workspace() const {
    auto args = sized<Args>();
    args.workspace = workspace_, args.workspace_bytes = workspace_bytes_;
    return args;
  }

  void choose() {
    auto args = sized<tilemoe_top_k_args>();
    args.K = K, args.logits = logits_, args.ids = ids_, args.scores = scores_;
    args.expert_counts = counts_;
    require(tilemoe_top_k(caller_.make(args)));
    see(ids_), see(scores_), see(counts_);
    auto again = sized<tilemoe_top_k_scores_args>();
    again.logits = logits_, again.ids = ids_, again.scores = scores_;
    require(tilemoe_top_k_scores(caller_.make(again)));
    see(scores_);
  }
  void token_routing() {
    tilemoe_routing* const routing = bind(TILEMOE_ROUTING_TOP_K);
    auto args = sized<tilemoe_route_tokens_args>();
    args.X = filled({T, d}), args.router_weight = filled({E, d});
    args.logits = filled({T, E}), args.expert_counts = counts_;
    require(tilemoe_route_tokens_workspace_bytes(spec_, d, &args.workspace_bytes));
    args.workspace = memory_.take(args.workspace_bytes);
    require(tilemoe_route_tokens(routing, caller_.make(args)));
    see(args.logits), see(counts_), see_offsets(*routing);
  }
  void top_k_routing() {
    routing_ = bind(TILEMOE_ROUTING_TOP_K);
    auto args = with_workspace<tilemoe_route_top_k_args>();
    args.ids = ids_, args.scores = scores_;
    require(tilemoe_route_top_k(routing_, caller_.make(args)));
  }
  size_t workspace_of(const tilemoe_experts* experts, tilemoe_pass pass) {
    auto query = sized<tilemoe_workspace_query>();
    query.experts = experts, query.routing = spec_, query.pass = pass;
    size_t bytes = 0;
    require(tilemoe_workspace_bytes(caller_.make(query), &bytes));
    see(bytes);
    return bytes;
  }
  void layer() {
    auto layer = sized<tilemoe_experts>();
    layer.d = d, layer.n = n, layer.E = E;
    const tilemoe_experts* const experts = caller_.make(layer);
    tilemoe_saved_size* const size = caller_.make(sized<tilemoe_saved_size>());
    require(tilemoe_saved_bytes(experts, spec_, size));
    see(size->rows), see(size->H), see(size->routing);

    auto weights = sized<tilemoe_weights>(), dweights = sized<tilemoe_weights>();
    weights.W1 = filled({E, 2 * n, d}), weights.W2 = filled({E, d, n});
    dweights.W1 = filled({E, 2 * n, d}), dweights.W2 = filled({E, d, n});
    auto state = sized<tilemoe_saved>();
    state.H = filled({T * K, 2 * n});
    tilemoe_saved* const saved = caller_.make(state);

    auto forward = sized<tilemoe_forward_args>();
    forward.routing = routing_, forward.weights = caller_.make(weights), forward.saved = saved;
    forward.X = filled({T, d}), forward.O = filled({T, d});
    forward.workspace_bytes = workspace_of(experts, TILEMOE_PASS_FORWARD);
    forward.workspace = memory_.take(forward.workspace_bytes);
    require(tilemoe_forward(experts, caller_.make(forward)));
    see(forward.O), see(saved->H);

    ds_ = filled({T * K});
    auto backward = sized<tilemoe_backward_args>();
    backward.mode = TILEMOE_BACKWARD_OVER_H;
    backward.routing = routing_, backward.weights = caller_.make(weights);
    backward.dweights = caller_.make(dweights), backward.saved = saved;
    backward.X = forward.X, backward.dO = forward.O, backward.dX = filled({T, d});
    backward.ds = ds_;
    backward.workspace_bytes = workspace_of(experts, TILEMOE_PASS_BACKWARD);
    backward.workspace = memory_.take(backward.workspace_bytes);
    require(tilemoe_backward(experts, caller_.make(backward)));
    see(backward.dX), see(ds_), see(dweights.W1), see(dweights.W2);
    EXPECT_EQ(saved->state, TILEMOE_SAVED_DH_OVER_H);
  }
  void router() {
    auto args = with_workspace<tilemoe_router_backward_args>();
    args.routing = routing_, args.ds = ds_, args.dlogits = filled({T, E});
    require(tilemoe_router_backward(caller_.make(args)));
    see(args.dlogits);
  }
  void rounded_routing() {
    tilemoe_routing* const routing = bind(TILEMOE_ROUTING_ROUNDED);
    auto args = with_workspace<tilemoe_route_rounded_args>();
    args.logits = logits_, args.expert_counts = counts_;
    require(tilemoe_route_rounded(routing, caller_.make(args)));
    see(counts_), see_offsets(*routing);
  }
  void general_routing() {
    tilemoe_routing* const routing = bind(TILEMOE_ROUTING_GENERAL);
    auto args = with_workspace<tilemoe_route_general_args>();
    args.tokens = fresh(TILEMOE_INT32, {T}), args.experts = fresh(TILEMOE_INT32, {T});
    for (int32_t t = 0; t < T; ++t)
      static_cast<int32_t*>(args.tokens.data)[t] = t,
      static_cast<int32_t*>(args.experts.data)[t] = static_cast<int32_t>(3 * t % E);
    args.scores = filled({T});
    require(tilemoe_route_general(routing, caller_.make(args)));
    see_offsets(*routing);
  }
  void grouped_routing() {
    tilemoe_routing* const routing = bind(TILEMOE_ROUTING_GROUPED);
    auto args = sized<tilemoe_route_grouped_args>();
    args.counts = fresh(TILEMOE_INT32, {E});
    for (int32_t e = 0; e < E; ++e) static_cast<int32_t*>(args.counts.data)[e] = e % 3;
    require(tilemoe_route_grouped(routing, caller_.make(args)));
    see_offsets(*routing);
  }
  void see_offsets(const tilemoe_routing& routing) {
    for (int64_t e = 0; e <= E; ++e) see(static_cast<size_t>(routing.offsets[e]));
  }
  void losses() {
    auto args = sized<tilemoe_router_losses_args>();
    args.balance_coefficient = 0.5f, args.z_coefficient = 0.25f;
    args.logits = logits_, args.expert_counts = counts_;
    args.losses = filled({2}), args.dlogits = filled({T, E});
    require(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, T, E, &args.workspace_bytes));
    args.workspace = memory_.take(args.workspace_bytes);
    require(tilemoe_router_losses(caller_.make(args)));
    see(args.losses), see(args.dlogits);
  }
  void sums_of_rows() {
    auto args = sized<tilemoe_sum_rows_args>();
    const void* const source[] = {filled({T, d}).data, filled({T, d}).data};
    args.sources = 2, args.source = source, args.source_rows = T;
    args.place = fresh(TILEMOE_INT32, {T, K});
    for (int32_t i = 0; i < T * K; ++i)
      static_cast<int32_t*>(args.place.data)[i] = static_cast<int32_t>(5 * i % (2 * T + 1));
    args.addend = filled({T, d}), args.out = filled({T, d});
    require(tilemoe_sum_rows(caller_.make(args)));
    see(args.out);
  }

  Caller& caller_;
  Memory memory_;
  int64_t salt_ = 0;
  tilemoe_tensor ids_, scores_, logits_, counts_, ds_{};
  const tilemoe_routing_spec* spec_ = nullptr;
  tilemoe_routing* routing_ = nullptr;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  std::vector<float> seen_;
};

TEST(InterfaceGrowth, OlderAndNewerCallersGetTheSame) {
  Today today;
  const std::vector<float> expected = LayerRun(today).all();
  ASSERT_GT(expected.size(), static_cast<size_t>(E * d * 3 * n));
  const auto expect_same = [&](Caller& caller, const char* who) {
    const std::vector<float> found = LayerRun(caller).all();
    ASSERT_EQ(found.size(), expected.size()) << who;
    EXPECT_EQ(std::memcmp(found.data(), expected.data(), expected.size() * sizeof(float)), 0)
        << who;
  };
  Older older;
  expect_same(older, "older");
  for (const size_t added : {4u, 8u, 64u, 1024u}) {
    Newer newer(added);
    expect_same(newer, "newer");
  }
}

// Where a newer caller asks for something that this version does not know, it is told so by the
// first entry that it calls with it.
TEST(InterfaceGrowth, WhatIsNotKnownIsRefused) {
  Newer newer(8, 1);
  try {
    LayerRun(newer).all();
    ADD_FAILURE() << "taken";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("newer version"), std::string::npos) << error.what();
  }
}

template <class Struct>
void expect_refused(const char* name, const std::function<tilemoe_status(Struct*)>& call) {
  const auto refused = [&](Struct* given, const char* words) {
    EXPECT_EQ(call(given), TILEMOE_INVALID_ARGUMENT) << name;
    const std::string error = tilemoe_last_error();
    EXPECT_NE(error.find(name), std::string::npos) << error;
    EXPECT_NE(error.find(words), std::string::npos) << error;
  };
  Newer asks(8, 1);
  refused(asks.make(sized<Struct>()), "newer version");
  Older older;
  refused(older.make(sized<Struct>(), kLeastBytes<Struct> - 4), "struct_size");
  refused(older.make(sized<Struct>(), 8), "struct_size");
  Struct unset{};
  refused(&unset, "struct_size is 0");
  unset.struct_size = UINT64_MAX;
  refused(&unset, "struct_size");
  refused(nullptr, "null");
}

TEST(InterfaceGrowth, EachStructIsChecked) {
  auto spec = sized<tilemoe_routing_spec>();
  spec.T = T, spec.E = E, spec.K = K;
  auto experts = sized<tilemoe_experts>();
  experts.d = d, experts.n = n, experts.E = E;
  Memory memory;
  size_t bytes = 0;
  require(tilemoe_routing_bytes(&spec, &bytes));
  auto routing = sized<tilemoe_routing>();
  require(tilemoe_routing_bind(&spec, memory.take(bytes), bytes, &routing));
  auto weights = sized<tilemoe_weights>();
  auto saved = sized<tilemoe_saved>();
  int64_t capacity = 0;

  expect_refused<tilemoe_routing_spec>(
      "routing spec", [&](auto* p) { return tilemoe_routing_capacity(p, &capacity); });
  expect_refused<tilemoe_routing>("routing", [&](auto* p) {
    const auto args = sized<tilemoe_route_top_k_args>();
    return tilemoe_route_top_k(p, &args);
  });
  expect_refused<tilemoe_top_k_args>("args", [](auto* p) { return tilemoe_top_k(p); });
  expect_refused<tilemoe_top_k_scores_args>("args",
                                            [](auto* p) { return tilemoe_top_k_scores(p); });
  expect_refused<tilemoe_route_top_k_args>(
      "args", [&](auto* p) { return tilemoe_route_top_k(&routing, p); });
  expect_refused<tilemoe_route_tokens_args>(
      "args", [&](auto* p) { return tilemoe_route_tokens(&routing, p); });
  expect_refused<tilemoe_route_general_args>(
      "args", [&](auto* p) { return tilemoe_route_general(&routing, p); });
  expect_refused<tilemoe_route_rounded_args>(
      "args", [&](auto* p) { return tilemoe_route_rounded(&routing, p); });
  expect_refused<tilemoe_route_grouped_args>(
      "args", [&](auto* p) { return tilemoe_route_grouped(&routing, p); });
  expect_refused<tilemoe_router_backward_args>("args",
                                               [](auto* p) { return tilemoe_router_backward(p); });
  expect_refused<tilemoe_router_losses_args>("args",
                                             [](auto* p) { return tilemoe_router_losses(p); });
  expect_refused<tilemoe_sum_rows_args>("args", [](auto* p) { return tilemoe_sum_rows(p); });
  expect_refused<tilemoe_experts>("experts", [&](auto* p) {
    auto size = sized<tilemoe_saved_size>();
    return tilemoe_saved_bytes(p, &spec, &size);
  });
  expect_refused<tilemoe_workspace_query>(
      "query", [&](auto* p) { return tilemoe_workspace_bytes(p, &bytes); });
  expect_refused<tilemoe_forward_args>("args",
                                       [&](auto* p) { return tilemoe_forward(&experts, p); });
  expect_refused<tilemoe_backward_args>("args",
                                        [&](auto* p) { return tilemoe_backward(&experts, p); });
  expect_refused<tilemoe_weights>("weights", [&](auto* p) {
    auto args = sized<tilemoe_forward_args>();
    args.routing = &routing, args.weights = p;
    return tilemoe_forward(&experts, &args);
  });
  expect_refused<tilemoe_saved>("saved", [&](auto* p) {
    auto args = sized<tilemoe_backward_args>();
    args.routing = &routing, args.weights = &weights, args.saved = p;
    return tilemoe_backward(&experts, &args);
  });
  expect_refused<tilemoe_part>("part", [&](auto* p) {
    auto args = sized<tilemoe_forward_args>();
    const auto without_bounds = sized<tilemoe_part>();
    args.routing = &routing, args.weights = &weights, args.part = p ? p : &without_bounds;
    return tilemoe_forward(&experts, &args);
  });
  // One that is absent asks for nothing.
  expect_refused<tilemoe_weights>("weights", [&](auto* p) {
    auto args = sized<tilemoe_backward_args>();
    args.routing = &routing, args.weights = &weights, args.saved = &saved;
    args.dweights = p;
    if (p == nullptr) args.weights = nullptr;
    return tilemoe_backward(&experts, &args);
  });
}

// A routing of before round_tokens could not say later what its spec asked for.
TEST(InterfaceGrowth, ARoutingHoldsWhatItsSpecAsksFor) {
  auto spec = sized<tilemoe_routing_spec>();
  spec.kind = TILEMOE_ROUTING_ROUNDED;
  spec.T = 2 * T, spec.E = E, spec.K = K, spec.m = 2;
  Memory memory;
  const auto bind = [&](Caller& caller) {
    size_t bytes = 0;
    require(tilemoe_routing_bytes(&spec, &bytes));
    constexpr size_t kBefore =
        offsetof(tilemoe_routing, spec) + offsetof(tilemoe_routing_spec, round_tokens);
    return tilemoe_routing_bind(&spec, memory.take(bytes), bytes,
                                caller.make(sized<tilemoe_routing>(), kBefore));
  };
  Older older;
  Today today;
  EXPECT_EQ(bind(older), TILEMOE_SUCCESS);
  spec.round_tokens = T;
  EXPECT_EQ(bind(today), TILEMOE_SUCCESS);
  EXPECT_EQ(bind(older), TILEMOE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tilemoe_last_error()).find("round_tokens"), std::string::npos)
      << tilemoe_last_error();
}

// Of a struct that the library fills, nothing is read but its size.
TEST(InterfaceGrowth, FilledStructsAreFilledAsFarAsTheyGo) {
  auto spec = sized<tilemoe_routing_spec>();
  spec.T = T, spec.E = E, spec.K = K;
  auto experts = sized<tilemoe_experts>();
  experts.d = d, experts.n = n, experts.E = E;
  Newer garbage(64, 0xEE);
  tilemoe_saved_size* const size = garbage.make(sized<tilemoe_saved_size>());
  require(tilemoe_saved_bytes(&experts, &spec, size));
  EXPECT_EQ(size->total, size->rows + size->H + size->routing);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(size);
  for (size_t i = sizeof *size; i < size->struct_size; ++i) EXPECT_EQ(bytes[i], 0) << i;
  EXPECT_EQ(size->struct_size, sizeof *size + 64);

  size_t needed = 0;
  require(tilemoe_routing_bytes(&spec, &needed));
  Memory memory;
  tilemoe_routing* const routing = garbage.make(sized<tilemoe_routing>());
  require(tilemoe_routing_bind(&spec, memory.take(needed), needed, routing));
  auto losses = sized<tilemoe_router_backward_args>();
  losses.routing = routing;
  EXPECT_EQ(tilemoe_router_backward(&losses), TILEMOE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tilemoe_last_error()).find("ds"), std::string::npos)
      << "the routing itself is right: " << tilemoe_last_error();

  auto unsized = tilemoe_saved_size{0, 7, 7, 7, 7};
  EXPECT_EQ(tilemoe_saved_bytes(&experts, &spec, &unsized), TILEMOE_INVALID_ARGUMENT);
  EXPECT_EQ(unsized.total, 7u);
}

}  // namespace
}  // namespace tilemoe::arguments
