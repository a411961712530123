// The calls that return a size, bind a routing or set the threads: bad specifications, and the
// documented sizes of good ones.
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "arguments_routing_problem.h"
#include "core/activation_kinds.h"
#include "tilemoe/layer.h"

namespace tilemoe::arguments {
namespace {

template <int kCall>
void run_spec_cases() {
  using P = SizesOf<kCall>;
  Cases<P> cases = {
    BAD(p.spec_pointer = nullptr, "spec is null"),
    BAD(p.spec.struct_size = 12, "struct_size is 12"),
    BAD(p.spec.device = tilemoe_device(-1), "device is -1"),
    BAD(p.spec.rounding = tilemoe_rounding(5), "rounding is 5"),
    BAD(p.spec.kind = TILEMOE_ROUTING_TOP_K;
        p.spec.round_tokens = kT, "round_tokens is 7", "without token rounding"),
    BAD(p.spec.kind = TILEMOE_ROUTING_GROUPED, "T is 7", "expected 0"),
    BAD(p.spec.T = INT32_MAX; p.spec.rounding = TILEMOE_ROUND_DOWN, "T * K", "2147483647 * 3"),
    BAD(p.spec.T = p.spec.E = p.experts.E = 1 << 20; p.spec.m = INT32_MAX, "rows"),
    BAD(p.spec.kind = TILEMOE_ROUTING_GENERAL; p.spec.pairs = int64_t{1} << 31, "2147483648"),
    BAD(p.spec.kind = TILEMOE_ROUTING_GENERAL; p.spec.pairs = -1, "pairs is -1"),
  };
  constexpr int64_t kPast = int64_t{1} << 31;
  BAD_VALUES(cases, "kind", p.spec.kind = tilemoe_routing_kind(v), -1, 4);
  BAD_VALUES(cases, "T", p.spec.T = v, -1, INT64_MIN, kPast, INT64_MAX);
  BAD_VALUES(cases, "E", p.spec.E = v, 0, -1, INT64_MIN, INT32_MAX, INT64_MAX);
  BAD_VALUES(cases, "K", p.spec.K = v, 0, -1, kE + 1, INT64_MAX);
  BAD_VALUES(cases, "m", p.spec.m = v, 0, -128, kPast, INT64_MAX);
  BAD_VALUES(cases, "capacity", p.spec.capacity = v, -1, INT64_MIN, kPast);
  BAD_VALUES(cases, "round_tokens", p.spec.round_tokens = v, -1, -kT, INT64_MIN, 2, kT + 1, 2 * kT,
             INT64_MAX);
  run_cases(cases);
}

TEST(SizeArguments, RoutingCapacity) {
  run_spec_cases<0>();
}
TEST(SizeArguments, RoutingBytes) {
  run_spec_cases<1>();
}
TEST(SizeArguments, RoutingWorkspace) {
  run_spec_cases<2>();
}
TEST(SizeArguments, RoutingBind) {
  run_spec_cases<3>();
}
TEST(SizeArguments, SavedBytes) {
  run_spec_cases<4>();
}
TEST(SizeArguments, LayerWorkspace) {
  run_spec_cases<5>();
}

TEST(SizeArguments, NowhereToWrite) {
  Sizes p;
  expect_refused(tilemoe_routing_capacity(&p.spec, nullptr), "capacity is null");
  expect_refused(tilemoe_routing_bytes(&p.spec, nullptr), "bytes is null");
  expect_refused(tilemoe_routing_workspace_bytes(&p.spec, nullptr), "bytes is null");
  expect_refused(tilemoe_routing_bind(&p.spec, p.arena.take(4096), 4096, nullptr),
                 "routing is null");
  expect_refused(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, kT, kE, nullptr),
                 "bytes is null");
  expect_refused(tilemoe_saved_bytes(&p.experts, &p.spec, nullptr), "size is null");
  expect_refused(tilemoe_workspace_bytes(&p.query, nullptr), "bytes is null");
}

// tilemoe_routing_layout describes where tilemoe_routing_bind lays the arrays out.
TEST(SizeArguments, RoutingLayout) {
  for (int kind = TILEMOE_ROUTING_TOP_K; kind <= TILEMOE_ROUTING_GROUPED; ++kind) {
    tilemoe_routing_spec spec{};
    spec.struct_size = sizeof spec;
    spec.device = TILEMOE_CPU, spec.kind = tilemoe_routing_kind(kind);
    spec.E = 6;
    if (kind != TILEMOE_ROUTING_GROUPED) spec.T = 37;
    if (kind == TILEMOE_ROUTING_TOP_K || kind == TILEMOE_ROUTING_ROUNDED) spec.K = 2, spec.m = 3;
    spec.capacity = 51;
    if (kind == TILEMOE_ROUTING_GENERAL) spec.pairs = 59;
    size_t bytes = 0;
    require(tilemoe_routing_bytes(&spec, &bytes));
    std::vector<int32_t> memory(bytes / sizeof(int32_t) + 4);
    void* begin = memory.data();
    size_t space = memory.size() * sizeof(int32_t);
    ASSERT_NE(std::align(16, bytes, begin, space), nullptr);
    tilemoe_routing routing{};
    routing.struct_size = sizeof routing;
    require(tilemoe_routing_bind(&spec, begin, bytes, &routing));
    std::map<std::string, const void*> fields = {
        {"offsets", routing.offsets},     {"counters", routing.counters},
        {"row_token", routing.row_token}, {"row_score", routing.row_score},
        {"pair_row", routing.pair_row},   {"token_offsets", routing.token_offsets}};
    const auto& bound = routing.spec;
    const std::map<int, int64_t> sizes = {{TILEMOE_ROUTING_SIZE_0, 0},
                                          {TILEMOE_ROUTING_SIZE_T, bound.T},
                                          {TILEMOE_ROUTING_SIZE_E, bound.E},
                                          {TILEMOE_ROUTING_SIZE_PAIRS, bound.pairs},
                                          {TILEMOE_ROUTING_SIZE_CAPACITY, bound.capacity}};
    tilemoe_routing_array arrays[TILEMOE_ROUTING_ARRAYS];
    int32_t count = 0;
    require(tilemoe_routing_layout(spec.kind, arrays, &count));
    int64_t at = 0;
    for (int32_t i = 0; i < count; ++i) {
      const auto found = fields.extract(arrays[i].name);
      ASSERT_FALSE(found.empty()) << arrays[i].name;
      EXPECT_EQ(found.mapped(), static_cast<const int32_t*>(begin) + at) << arrays[i].name;
      at += (sizes.at(arrays[i].size) + arrays[i].more + 3) / 4 * 4;
    }
    EXPECT_EQ(bytes, at * sizeof(int32_t)) << kind;
    for (const auto& [name, place] : fields) EXPECT_EQ(place, nullptr) << name << " of " << kind;
  }
  tilemoe_routing_array arrays[TILEMOE_ROUTING_ARRAYS];
  int32_t count = 0;
  expect_refused(tilemoe_routing_layout(tilemoe_routing_kind(4), arrays, &count), "kind is 4");
  expect_refused(tilemoe_routing_layout(TILEMOE_ROUTING_TOP_K, nullptr, &count), "arrays is null");
  expect_refused(tilemoe_routing_layout(TILEMOE_ROUTING_TOP_K, arrays, nullptr), "count is null");
}

TEST(SizeArguments, RoutingMemory) {
  Sizes p;
  size_t bytes = 0;
  require(tilemoe_routing_bytes(&p.spec, &bytes));
  char* memory = static_cast<char*>(p.arena.take(bytes + 16));
  expect_refused(tilemoe_routing_bind(&p.spec, nullptr, bytes, &p.routing), "null");
  expect_refused(tilemoe_routing_bind(&p.spec, memory + 4, bytes, &p.routing), "16 bytes");
  expect_refused(tilemoe_routing_bind(&p.spec, memory, bytes - 1, &p.routing), "bytes, expected");
  expect_refused(tilemoe_routing_bind(&p.spec, memory, 0, &p.routing), "0 bytes");
  EXPECT_EQ(p.routing.offsets, nullptr);
  const auto before = p.arena.bytes();
  EXPECT_EQ(tilemoe_routing_bind(&p.spec, memory, bytes, &p.routing), TILEMOE_SUCCESS);
  EXPECT_TRUE(p.arena.bytes() == before) << "binding wrote";
}

TEST(SizeArguments, Queries) {
  Sizes p;
  const auto expect = [&](tilemoe_pass pass, int mode, uint32_t gradients, const char* word) {
    p.query.pass = pass, p.query.mode = tilemoe_backward_mode(mode);
    p.query.gradients = gradients;
    expect_refused(p.workspace(), word);
  };
  for (int pass : {-1, 3, 1 << 20}) expect(tilemoe_pass(pass), 0, 0, "pass is");
  for (int mode : {-1, 4, 1 << 20}) expect(TILEMOE_PASS_BACKWARD, mode, 0, "mode is");
  expect(TILEMOE_PASS_FORWARD, 1, 0, "mode is 1");
  expect(TILEMOE_PASS_FORWARD, 0, TILEMOE_GRADIENT_X, "gradients 1");
  expect(TILEMOE_PASS_BACKWARD, 0, 1024, "gradients is 1024");
  for (uint32_t bit :
       {TILEMOE_GRADIENT_S, TILEMOE_GRADIENT_W2, TILEMOE_GRADIENT_B2, TILEMOE_GRADIENT_LORA_2})
    expect(TILEMOE_PASS_BACKWARD, TILEMOE_BACKWARD_REST, bit, "REST");
  p.query = {};
  expect_refused(p.workspace(), "query.struct_size is 0");
  expect_refused(tilemoe_workspace_bytes(nullptr, &p.bytes), "query is null");
  p.query.struct_size = sizeof p.query, p.query.routing = &p.spec;
  expect_refused(p.workspace(), "experts is null");
  p.query.experts = &p.experts;
  for (int sms : {-1, TILEMOE_MAX_SMS + 1, INT32_MIN}) {
    p.query.cuda_sms = sms;
    expect_refused(p.workspace(), "cuda_sms is " + std::to_string(sms));
  }
  p.query.cuda_sms = 132;
  expect_refused(p.workspace(), "the device is the CPU");
  p.query.cuda_sms = 0, p.query.cuda_arch = "sm90";
  expect_refused(p.workspace(), "cuda_arch is sm90 without cuda_sms");
  p.query.cuda_arch = nullptr;
  p.experts.device = p.spec.device = TILEMOE_CUDA;
  expect_refused(p.workspace(), "CUDA", TILEMOE_UNSUPPORTED);
  EXPECT_EQ(p.bytes, 77u);
}

// The sizes of a pass on a GPU, on a machine without one. A build without CUDA has none.
TEST(SizeArguments, OfACudaDeviceElsewhere) {
  Sizes p;
  p.experts.device = p.spec.device = TILEMOE_CUDA, p.experts.dtype = TILEMOE_BFLOAT16;
  p.query.pass = TILEMOE_PASS_BACKWARD, p.query.cuda_sms = 132;
  const tilemoe_status status = p.workspace();
  if (status == TILEMOE_UNSUPPORTED) {
    expect_error("TileMoE was built without CUDA");
    expect_refused(tilemoe_routing_workspace_bytes(&p.spec, &p.bytes), "built without CUDA",
                   TILEMOE_UNSUPPORTED);
    return;
  }
  ASSERT_EQ(status, TILEMOE_SUCCESS) << tilemoe_last_error();
  const size_t of_132 = p.bytes;
  EXPECT_GT(of_132, sizeof(uint16_t) * static_cast<size_t>(p.experts.n * p.spec.T));
  p.query.cuda_arch = "auto";
  EXPECT_EQ(p.workspace(), TILEMOE_SUCCESS) << tilemoe_last_error();
  EXPECT_EQ(p.bytes, of_132);
  p.query.cuda_arch = "sm70";
  expect_refused(p.workspace(),
                 "arch must be 'auto', 'sm80', 'sm90' or 'sm100', got 'sm70', set by cuda_arch");
  p.query.cuda_arch = nullptr, p.query.cuda_sms = 1;
  EXPECT_EQ(p.workspace(), TILEMOE_SUCCESS) << tilemoe_last_error();
  EXPECT_LE(p.bytes, of_132);
  p.experts.dtype = TILEMOE_FLOAT32;
  expect_refused(p.workspace(), "expected bfloat16 or float16 on CUDA", TILEMOE_UNSUPPORTED);
  EXPECT_EQ(tilemoe_routing_workspace_bytes(&p.spec, &p.bytes), TILEMOE_SUCCESS);
  EXPECT_EQ(tilemoe_router_losses_workspace_bytes(TILEMOE_CUDA, kT, kE, &p.bytes), TILEMOE_SUCCESS);
}

// Any subset of the gradients needs at most the workspace of all of them.
TEST(SizeArguments, WorkspaceOfParts) {
  Sizes p;
  p.query.pass = TILEMOE_PASS_BACKWARD;
  const auto bytes_of = [&](tilemoe_backward_mode mode, uint32_t gradients) {
    p.query.mode = mode, p.query.gradients = gradients;
    EXPECT_EQ(p.workspace(), TILEMOE_SUCCESS) << tilemoe_last_error();
    return p.bytes;
  };
  for (const auto mode : {TILEMOE_BACKWARD_WHOLE, TILEMOE_BACKWARD_OVER_H, TILEMOE_BACKWARD_FIRST})
    for (uint32_t some = 1; some < 256; ++some) {
      EXPECT_LE(bytes_of(mode, some), bytes_of(mode, 0)) << mode << " " << some;
      for (uint32_t bit = 1; bit < 256; bit *= 2)
        EXPECT_LE(bytes_of(mode, some & ~bit ? some & ~bit : bit), bytes_of(mode, some | bit))
            << mode << " " << some;
    }
  EXPECT_EQ(bytes_of(TILEMOE_BACKWARD_WHOLE, 0), bytes_of(TILEMOE_BACKWARD_FIRST, 0));
  EXPECT_LT(bytes_of(TILEMOE_BACKWARD_OVER_H, 0), bytes_of(TILEMOE_BACKWARD_WHOLE, 0));
  EXPECT_LT(bytes_of(TILEMOE_BACKWARD_REST, TILEMOE_GRADIENT_W1),
            bytes_of(TILEMOE_BACKWARD_REST, TILEMOE_GRADIENT_X));
  // db2 needs no dH, dW2 no partial sums of ds
  EXPECT_LT(bytes_of(TILEMOE_BACKWARD_WHOLE, TILEMOE_GRADIENT_W2),
            bytes_of(TILEMOE_BACKWARD_WHOLE, TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_S));
  EXPECT_EQ(bytes_of(TILEMOE_BACKWARD_WHOLE, TILEMOE_GRADIENT_B2), 0u);
}

// The largest sizes do not wrap around; sizes whose product exceeds 64 bits are refused.
TEST(SizeArguments, OverflowingSizes) {
  Sizes p;
  constexpr int64_t kWidest = int64_t{1} << 24;
  p.spec.kind = TILEMOE_ROUTING_GROUPED, p.spec.T = 0, p.spec.K = 0, p.spec.m = 0;
  p.spec.capacity = INT32_MAX;
  p.experts.d = p.experts.n = kWidest;
  p.experts.E = p.spec.E = 1;
  ASSERT_EQ(p.workspace(), TILEMOE_SUCCESS) << tilemoe_last_error();
  EXPECT_GE(p.bytes, sizeof(float) * 2 * kWidest * INT32_MAX);  // A and Y
  p.query.pass = TILEMOE_PASS_BACKWARD;
  ASSERT_EQ(p.workspace(), TILEMOE_SUCCESS) << tilemoe_last_error();
  EXPECT_GE(p.bytes, sizeof(float) * 3 * kWidest * INT32_MAX);  // dH and dX~
  p.bytes = 77;
  p.experts.E = p.spec.E = INT32_MAX - 1;
  for (int pass = 0; pass < 3; ++pass) {
    p.query.pass = static_cast<tilemoe_pass>(pass);
    expect_refused(p.workspace(), "overflows");
  }
  expect_refused(tilemoe_saved_bytes(&p.experts, &p.spec, &p.saved), "overflows");
  p.experts.d = 2 * kWidest;
  expect_refused(p.workspace(), "d is 33554432");
  EXPECT_EQ(p.bytes, 77u);
  EXPECT_EQ(p.saved.total, 77u);
}

// The limit on rows, smaller on some hardware, is checked by every size query.
TEST(SizeArguments, RowsOfADevice) {
  constexpr int64_t kCuda = int64_t{1} << 30;
  Sizes p;
  p.spec.kind = TILEMOE_ROUTING_GROUPED, p.spec.T = 0, p.spec.K = 0, p.spec.m = 0;
  p.spec.capacity = kCuda;
  EXPECT_EQ(tilemoe_routing_capacity(&p.spec, &p.capacity), TILEMOE_SUCCESS);
  p.spec.device = p.experts.device = TILEMOE_CUDA;
  expect_refused(tilemoe_routing_capacity(&p.spec, &p.capacity), "1073741823");
  expect_refused(tilemoe_routing_bytes(&p.spec, &p.bytes), "1073741823");
  expect_refused(tilemoe_saved_bytes(&p.experts, &p.spec, &p.saved), "1073741823");
  expect_refused(tilemoe_router_losses_workspace_bytes(TILEMOE_CUDA, kCuda, kE, &p.bytes),
                 "1073741823");
  p.spec.capacity = kCuda - 1;
  EXPECT_EQ(tilemoe_routing_bytes(&p.spec, &p.bytes), TILEMOE_SUCCESS) << tilemoe_last_error();
  p.spec.kind = TILEMOE_ROUTING_TOP_K, p.spec.capacity = 0;
  p.spec.T = kCuda / 2, p.spec.K = 2;
  expect_refused(tilemoe_routing_bytes(&p.spec, &p.bytes), "expected at most 1073741823");
}

TEST(SizeArguments, LossesWorkspace) {
  size_t bytes = 77;
  expect_refused(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, -1, kE, &bytes), "T is -1");
  expect_refused(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, kT, 0, &bytes), "E is 0");
  expect_refused(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, INT64_MAX, kE, &bytes), "T is");
  expect_refused(tilemoe_router_losses_workspace_bytes(tilemoe_device(4), kT, kE, &bytes),
                 "device is 4");
  EXPECT_EQ(bytes, 77u);
}

TEST(SizeArguments, LogitsWorkspace) {
  size_t bytes = 77;
  const auto expect = [&](tilemoe_device device, int64_t T, int64_t E, int64_t d,
                          tilemoe_dtype weight, const char* words,
                          tilemoe_status status = TILEMOE_INVALID_ARGUMENT) {
    expect_refused(tilemoe_router_logits_workspace_bytes(device, T, E, d, weight, &bytes), words,
                   status);
  };
  expect(TILEMOE_CPU, -1, kE, kD, TILEMOE_FLOAT32, "T is -1");
  expect(TILEMOE_CPU, kT, 0, kD, TILEMOE_FLOAT32, "E is 0");
  expect(TILEMOE_CPU, kT, kE, 12, TILEMOE_FLOAT32, "d is 12");
  expect(TILEMOE_CPU, kT, kE, INT64_MAX - 7, TILEMOE_FLOAT32, "d is");
  expect(TILEMOE_CPU, kT, kE, kD, TILEMOE_INT32, "weight_dtype is int32");
  expect(tilemoe_device(4), kT, kE, kD, TILEMOE_FLOAT32, "device is 4");
  expect(TILEMOE_CUDA, kT, kE, kD, TILEMOE_FLOAT32, "CUDA", TILEMOE_UNSUPPORTED);
  EXPECT_EQ(bytes, 77u);
}

TEST(SizeArguments, Threads) {
  const int before = tilemoe_num_threads();
  for (int threads : {-1, INT32_MIN, 4097, INT32_MAX})
    expect_refused(tilemoe_set_num_threads(threads), "threads is");
  EXPECT_EQ(tilemoe_num_threads(), before);
}

// By both names of the functions.
TEST(SizeArguments, Archs) {
  struct Functions {
    tilemoe_status (*select)(const char*);
    const char* (*describe)();
  };
  std::string texts[2];
  std::string* text = texts;
  for (const Functions& names : {Functions{tilemoe_set_cuda_arch, tilemoe_cuda_arch},
                                 Functions{tilemoe_set_cuda_kit, tilemoe_cuda_kit}}) {
    for (const char* none : {"", "SM80", "sm70", "sm80 ", "hopper", "sm1000"}) {
      EXPECT_NE(names.select(none), TILEMOE_SUCCESS) << none;
      EXPECT_NE(std::string(tilemoe_last_error()).find(" arch"), std::string::npos) << none;
      *text += tilemoe_last_error();
    }
    for (const char* automatic : {"auto", static_cast<const char*>(nullptr)})
      EXPECT_EQ(names.select(automatic), TILEMOE_SUCCESS);
    // Without a device no arch is selected.
    const std::string said = names.describe();
    EXPECT_TRUE(said.find("TileMoE was built without CUDA") != std::string::npos ||
                said.find("use the CPU backend") != std::string::npos)
        << said;
    EXPECT_EQ(said, tilemoe_last_error());
    *text++ += said;
  }
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(SizeArguments, Devices) {
  EXPECT_EQ(tilemoe_device_available(TILEMOE_CPU), 1);
  EXPECT_STREQ(tilemoe_last_error(), "");
  EXPECT_EQ(tilemoe_device_available(TILEMOE_CUDA), 0);
  EXPECT_NE(std::string(tilemoe_last_error()).find("CUDA"), std::string::npos);
  EXPECT_EQ(tilemoe_device_available(tilemoe_device(9)), 0);
  EXPECT_NE(std::string(tilemoe_device_description(TILEMOE_CPU)).find("cpu"), std::string::npos);
  EXPECT_NE(std::string(tilemoe_device_description(tilemoe_device(9))).find("device is 9"),
            std::string::npos);
}

// Unknown numbers have names as well.
TEST(SizeArguments, Names) {
  const std::string version = std::to_string(TILEMOE_VERSION_MAJOR) + "." +
                              std::to_string(TILEMOE_VERSION_MINOR) + "." +
                              std::to_string(TILEMOE_VERSION_PATCH);
  EXPECT_EQ(tilemoe_version(), version);
  EXPECT_EQ(tilemoe_version_number(), TILEMOE_VERSION_NUMBER);
  EXPECT_EQ(TILEMOE_VERSION_NUMBER, 200);
  for (int number : {-1, 5, 10, 1 << 30}) {
    EXPECT_STREQ(tilemoe_status_name(tilemoe_status(number)), "unknown status");
    EXPECT_STREQ(tilemoe_dtype_name(tilemoe_dtype(number)), "unknown dtype");
    EXPECT_EQ(tilemoe_dtype_size(tilemoe_dtype(number)), 0u);
  }
  for (int number : {-1, kActivationCount, 1 << 30}) {
    EXPECT_STREQ(tilemoe_activation_name(tilemoe_activation(number)), "unknown activation");
    EXPECT_EQ(tilemoe_activation_gated(tilemoe_activation(number)), 0);
  }
}

// The documented bound on the rows of each kind of routing.
TEST(SizeArguments, DocumentedCapacities) {
  constexpr int64_t T = 100, E = 6, K = 2, m = 9;
  const auto rounded = [](Rounding rule, int64_t tokens) {
    return RoutingSpec::rounded(Device::kCpu, tokens, E, K, rule, m).bound();
  };
  EXPECT_EQ(RoutingSpec::top_k(Device::kCpu, T, E, K).bound(), T * K);
  EXPECT_EQ(RoutingSpec::general(Device::kCpu, T, E, 31).bound(), 31);
  EXPECT_EQ(RoutingSpec::grouped(Device::kCpu, 41, E).bound(), 41);
  EXPECT_EQ(rounded(Rounding::kNearest, T), T * K + E * (m / 2));
  EXPECT_EQ(rounded(Rounding::kUp, T), T * K + E * (m - 1));
  EXPECT_EQ(rounded(Rounding::kStochastic, T), T * K + E * (m - 1));
  EXPECT_EQ(rounded(Rounding::kDown, T), T * K);
  EXPECT_EQ(rounded(Rounding::kBalanced, T), T * K + m);
  EXPECT_EQ(rounded(Rounding::kUp, 10), 10 * E);  // never more than every token in every expert
  const auto in_groups = [](Rounding rule, int64_t tokens, int64_t round_tokens) {
    return RoutingSpec::rounded(Device::kCpu, tokens, E, K, rule, m, round_tokens).bound();
  };
  EXPECT_EQ(in_groups(Rounding::kNearest, T, 25), 4 * (25 * K + E * (m / 2)));
  EXPECT_EQ(in_groups(Rounding::kUp, T, 10), 10 * 10 * E);
  EXPECT_EQ(in_groups(Rounding::kBalanced, T, 50), 2 * (50 * K + m));
  EXPECT_EQ(in_groups(Rounding::kUp, T, T), rounded(Rounding::kUp, T));
  EXPECT_EQ(in_groups(Rounding::kUp, 0, 25), 0);
  EXPECT_EQ(RoutingSpec::top_k(Device::kCpu, 0, E, K).bound(), 0);
  RoutingSpec chosen = RoutingSpec::top_k(Device::kCpu, T, E, K);
  chosen.capacity = 55;
  EXPECT_EQ(chosen.bound(), 55);
}

// The message of one thread's failure is not another's.
TEST(SizeArguments, ErrorsBelongToTheirThread) {
  expect_refused(tilemoe_set_num_threads(-1), "threads is -1");
  std::string seen = "not run";
  std::thread([&] { seen = tilemoe_last_error(); }).join();
  EXPECT_EQ(seen, "");
  EXPECT_NE(std::string(tilemoe_last_error()), "");
}

}  // namespace
}  // namespace tilemoe::arguments
