// Callers of other versions through every entry, on the CPU: an older one, whose structs end at an
// inaccessible page, and a newer one, whose structs have an additional field.
#include "arguments_layer_problem.h"
#include "core/check.h"
#include "fuzz_memory.h"

namespace tilemoe::arguments {
namespace {

// Turns a struct of this version into that of another.
class Caller {
 public:
  virtual ~Caller() = default;
  template <class Struct>
  Struct* make(const Struct& today, size_t min_bytes = kMinBytes<Struct>) {
    return reinterpret_cast<Struct*>(place(&today, sizeof(Struct), min_bytes));
  }

 protected:
  virtual void* place(const void* today, size_t bytes, size_t min_bytes) = 0;
};

class Older final : public Caller {
  void* place(const void* today, size_t, size_t min_bytes) override {
    regions_.push_back(std::make_unique<fuzz::Region>(min_bytes));
    unsigned char* const at = regions_.back()->place(min_bytes, 8, true);
    std::memcpy(at, today, min_bytes);
    const uint64_t size = min_bytes;
    std::memcpy(at, &size, sizeof size);
    return at;
  }
  std::vector<std::unique_ptr<fuzz::Region>> regions_;
};

// With `added` additional bytes, all of them `value`, between pages as above.
class Newer final : public Caller {
 public:
  explicit Newer(size_t added, unsigned char value = 0) : added_(added), value_(value) {}

 private:
  void* place(const void* today, size_t bytes, size_t) override {
    const uint64_t size = bytes + added_;
    regions_.push_back(std::make_unique<fuzz::Region>(size));
    unsigned char* const at = regions_.back()->place(size, 8, true);
    std::memcpy(at, today, bytes);
    std::memset(at + bytes, value_, added_);
    std::memcpy(at, &size, sizeof size);
    return at;
  }
  size_t added_;
  unsigned char value_;
  std::vector<std::unique_ptr<fuzz::Region>> regions_;
};

class Today final : public Caller {
  void* place(const void* today, size_t bytes, size_t) override {
    memory_.emplace_back((bytes + 7) / 8);
    std::memcpy(memory_.back().data(), today, bytes);
    return memory_.back().data();
  }
  std::vector<std::vector<uint64_t>> memory_;
};

using AnyRouterBackward = RouterBackward<TILEMOE_ROUTING_TOP_K, TILEMOE_SOFTMAX_OVER_CHOSEN>;

template <class Struct>
Struct sized() {
  Struct value{};
  value.struct_size = sizeof value;
  return value;
}

// A spec that rounds needs the field that says how; a caller that rounds may still not know groups.
size_t min_spec_bytes(const tilemoe_routing_spec& spec) {
  return spec.kind == TILEMOE_ROUTING_ROUNDED ? offsetof(tilemoe_routing_spec, round_tokens)
                                              : kMinBytes<tilemoe_routing_spec>;
}
tilemoe_routing* make_routing(Caller& caller, const tilemoe_routing_spec& spec) {
  return caller.make(sized<tilemoe_routing>(),
                     offsetof(tilemoe_routing, spec) + min_spec_bytes(spec));
}
// Bound like the call's own routing, which may be built already: binding writes no memory.
tilemoe_routing* bound_routing(Caller& caller, const RoutingProblem& p) {
  tilemoe_routing* const routing = make_routing(caller, p.spec);
  require(tilemoe_routing_bind(&p.spec, p.memory, p.memory_bytes, routing));
  return routing;
}

// ------------------------------------------------- a call's structs, by the caller

template <class Args, tilemoe_status (*kEntry)(const Args*)>
void hand(Caller& caller, Entry<Args, kEntry>& p) {
  if constexpr (std::is_same_v<Args, tilemoe_router_backward_args>)
    p.args.routing = bound_routing(caller, static_cast<AnyRouterBackward&>(p));
  p.args_pointer = caller.make(p.args);
}
template <class Args, tilemoe_status (*kEntry)(tilemoe_routing*, const Args*)>
void hand(Caller& caller, Building<Args, kEntry>& p) {
  p.routing_pointer = bound_routing(caller, p);
  p.args_pointer = caller.make(p.args);
}
template <bool kBackward>
void hand(Caller& caller, Pass<kBackward>& p) {
  auto& args = p.args();
  for (tilemoe_weights* all : {&p.weights, &p.dweights})
    all->b1 = all->b2 = {};  // newer than others
  args.routing = bound_routing(caller, p);
  args.weights = caller.make(p.weights);
  args.saved = caller.make(p.saved);
  if constexpr (kBackward) {
    args.mode = TILEMOE_BACKWARD_OVER_H;
    args.dweights = caller.make(p.dweights);
  }
  p.experts_pointer = caller.make(p.experts);
  p.args_pointer = caller.make(args);
}
template <int kCall>
void hand(Caller& caller, SizesOf<kCall>& p) {
  p.spec_pointer = caller.make(p.spec, min_spec_bytes(p.spec));
  p.experts_pointer = caller.make(p.experts);
  p.routing_pointer = make_routing(caller, p.spec);
  p.saved_pointer = caller.make(sized<tilemoe_saved_size>());
  p.query_pointer = caller.make(p.query);
}

// The outputs that a call wrote outside of its arena.
template <class P>
std::vector<int64_t> numbers(const P&) {
  return {};
}
template <int kCall>
std::vector<int64_t> numbers(const SizesOf<kCall>& p) {
  const tilemoe_saved_size& saved = *p.saved_pointer;
  return {p.capacity,
          static_cast<int64_t>(p.bytes),
          static_cast<int64_t>(saved.rows),
          static_cast<int64_t>(saved.H),
          static_cast<int64_t>(saved.routing),
          p.routing_pointer->offsets != nullptr};
}
template <bool kBackward>
std::vector<int64_t> numbers(Pass<kBackward>& p) {
  return {p.args().saved->state};
}

template <class P>
void expect_growth() {
  const auto run = [](Caller& caller) {
    P p;
    hand(caller, p);
    expect_taken(p);
    return std::pair(p.arena.contents(), numbers(p));
  };
  Today today;
  const auto expected = run(today);
  const auto untouched = P().arena.contents();
  EXPECT_TRUE(expected.first != untouched || !expected.second.empty()) << "nothing was written";
  Older older;
  EXPECT_TRUE(run(older) == expected) << P().function() << ": older";
  for (const size_t added : {4u, 8u, 64u, 1024u}) {
    Newer newer(added);
    EXPECT_TRUE(run(newer) == expected) << P().function() << ": newer";
  }
  // A field that this version does not know is refused by the first entry that reads the struct.
  Newer unknown_field(8, 1);
  P p;
  hand(unknown_field, p);
  expect_refused(p.call(), "newer version");
}

using AnyRouting = RouteRounded<TILEMOE_ROUND_NEAREST>;
using AnyTokens = RouteTokens<TILEMOE_SOFTMAX_OVER_CHOSEN>;
using AnyTopK = TopK<TILEMOE_SOFTMAX_OVER_CHOSEN>;
using Bind = SizesOf<3>;

TEST(InterfaceGrowth, OlderAndNewerCallersGetTheSame) {
  expect_growth<AnyTopK>(), expect_growth<TopKScores>(), expect_growth<Losses>();
  expect_growth<AnyRouterBackward>(), expect_growth<SumRows>(), expect_growth<Logits>();
  expect_growth<Dequantizing>();
  expect_growth<RouteTopK>(), expect_growth<AnyTokens>(), expect_growth<RouteGeneral>();
  expect_growth<AnyRouting>(), expect_growth<RouteGrouped>();
  expect_growth<SizesOf<0>>(), expect_growth<SizesOf<1>>(), expect_growth<SizesOf<2>>();
  expect_growth<Bind>(), expect_growth<SizesOf<4>>(), expect_growth<SizesOf<5>>();
  expect_growth<Pass<false>>(), expect_growth<Pass<true>>();
}

// A struct of each wrong size in place of one of a valid call.
template <class P, class Struct, class Set>
void expect_checked(const char* name, const Struct& today, const Set& set, bool required = true) {
  const auto refused = [&](Struct* given, const char* words) {
    P p;
    set(p, given);
    EXPECT_EQ(p.call(), TILEMOE_INVALID_ARGUMENT) << name;
    expect_error(name), expect_error(words);
  };
  Newer unknown_field(8, 1);
  refused(unknown_field.make(today), "newer version");
  Older older;
  refused(older.make(today, kMinBytes<Struct> - 4), "struct_size");
  refused(older.make(today, 8), "struct_size");
  Struct unset = today;
  unset.struct_size = 0;
  refused(&unset, "struct_size is 0");
  unset.struct_size = UINT64_MAX;
  refused(&unset, "struct_size");
  if (required) refused(nullptr, "null");
}
template <class P>
void expect_checked_args() {
  P p;
  expect_checked<P>("args", *p.args_pointer, [](P& bad, auto* args) { bad.args_pointer = args; });
}

TEST(InterfaceGrowth, EachStructIsChecked) {
  expect_checked_args<AnyTopK>(), expect_checked_args<TopKScores>();
  expect_checked_args<Losses>(), expect_checked_args<AnyRouterBackward>();
  expect_checked_args<SumRows>(), expect_checked_args<RouteTopK>();
  expect_checked_args<Logits>();
  expect_checked_args<Dequantizing>();
  expect_checked_args<AnyTokens>(), expect_checked_args<RouteGeneral>();
  expect_checked_args<AnyRouting>(), expect_checked_args<RouteGrouped>();
  expect_checked_args<Pass<false>>(), expect_checked_args<Pass<true>>();
  const RouteTopK top_k;
  expect_checked<SizesOf<0>>("routing spec", top_k.spec,
                             [](auto& p, auto* spec) { p.spec_pointer = spec; });
  expect_checked<RouteTopK>("routing", top_k.routing,
                            [](auto& p, auto* routing) { p.routing_pointer = routing; });
  const Pass<true> pass;
  expect_checked<SizesOf<4>>("experts", pass.experts,
                             [](auto& p, auto* experts) { p.experts_pointer = experts; });
  expect_checked<Pass<false>>("weights", pass.weights,
                              [](auto& p, auto* weights) { p.args().weights = weights; });
  expect_checked<Pass<true>>("saved", pass.saved,
                             [](auto& p, auto* saved) { p.args().saved = saved; });
  expect_checked<Pass<false>>(
      "part", pass.part, [](auto& p, auto* part) { p.args().part = part; }, false);
  auto quantized = sized<tilemoe_quantized_weights>();
  quantized.W2.format = TILEMOE_FORMAT_FP8;
  const auto set_quantized = [](auto& p, auto* all) {
    p.experts.format_2 = TILEMOE_FORMAT_FP8;
    p.args().quantized = all;
  };
  expect_checked<Pass<false>>("quantized", quantized, set_quantized);
  expect_checked<Pass<true>>("quantized", quantized, set_quantized);
  expect_checked<Pass<true>>(
      "weights", pass.dweights, [](auto& p, auto* all) { p.args().dweights = all; }, false);
  // An absent struct is not read: the query's own pointer is checked before its fields.
  struct Query : Sizes {
    const char* function() const { return "tilemoe_workspace_bytes"; }
    tilemoe_status call() { return tilemoe_workspace_bytes(pointer, &bytes); }
    const tilemoe_workspace_query* pointer = &query;
  };
  expect_checked<Query>("query", Query().query, [](auto& p, auto* query) { p.pointer = query; });
}

// A routing of a version before round_tokens cannot keep the spec's round_tokens.
TEST(InterfaceGrowth, ARoutingKeepsTheFieldsOfItsSpec) {
  auto spec = sized<tilemoe_routing_spec>();
  spec.kind = TILEMOE_ROUTING_ROUNDED;
  spec.T = 2 * kT, spec.E = kE, spec.K = kK, spec.m = 2;
  Arena memory;
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
  spec.round_tokens = kT;
  EXPECT_EQ(bind(today), TILEMOE_SUCCESS);
  EXPECT_EQ(bind(older), TILEMOE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tilemoe_last_error()).find("round_tokens"), std::string::npos)
      << tilemoe_last_error();
}

// Only the size of a struct that the library fills is read.
TEST(InterfaceGrowth, FilledStructsAreFilledUpToTheirSize) {
  auto spec = sized<tilemoe_routing_spec>();
  spec.T = kT, spec.E = kE, spec.K = kK;
  auto experts = sized<tilemoe_experts>();
  experts.d = kD, experts.n = kN, experts.E = kE;
  Newer garbage(64, 0xEE);
  tilemoe_saved_size* const size = garbage.make(sized<tilemoe_saved_size>());
  require(tilemoe_saved_bytes(&experts, &spec, size));
  EXPECT_EQ(size->total, size->rows + size->H + size->routing + size->P1 + size->P2);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(size);
  for (size_t i = sizeof *size; i < size->struct_size; ++i) EXPECT_EQ(bytes[i], 0) << i;
  EXPECT_EQ(size->struct_size, sizeof *size + 64);

  size_t needed = 0;
  require(tilemoe_routing_bytes(&spec, &needed));
  Arena memory;
  tilemoe_routing* const routing = garbage.make(sized<tilemoe_routing>());
  require(tilemoe_routing_bind(&spec, memory.take(needed), needed, routing));
  auto losses = sized<tilemoe_router_backward_args>();
  losses.routing = routing;
  EXPECT_EQ(tilemoe_router_backward(&losses), TILEMOE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tilemoe_last_error()).find("ds"), std::string::npos)
      << "the routing itself is right: " << tilemoe_last_error();

  auto unsized = tilemoe_saved_size{0, 7, 7, 7, 7, 7, 7, 7};
  EXPECT_EQ(tilemoe_saved_bytes(&experts, &spec, &unsized), TILEMOE_INVALID_ARGUMENT);
  EXPECT_EQ(unsized.total, 7u);
}

}  // namespace
}  // namespace tilemoe::arguments
