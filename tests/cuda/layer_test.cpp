// The whole layer on the GPU through the public interface: the registry against float64, and its
// use with streams, graphs, several devices and a busy GPU.
#include <gtest/gtest.h>

#include <array>
#include <exception>
#include <thread>

#include "cuda/device_layer.h"
#include "layer_support.h"

namespace tilemoe::verify {
namespace {

class RegistryForward : public testing::TestWithParam<Case> {};
class IntegersForward : public testing::TestWithParam<Case> {};

// Bounded, or refused if the arch has no kernels of the case's recipe.
TEST_P(RegistryForward, IsBounded) {
  const auto run = [] {
    expect_passed(check_case(GetParam(), 1, cuda_memory(), Passes::kForward));
  };
  if (arch_computes(tilemoe_cuda_arch(), GetParam())) return run();
  try {
    run();
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnsupported) << error.what();
    EXPECT_NE(std::string(error.what()).find("fp8"), std::string::npos) << error.what();
  }
}

TEST_P(IntegersForward, AreExact) {
  expect_passed(check_case(GetParam(), 1, cuda_memory(), Passes::kForward));
}

std::vector<Case> cases_of_the_gpu() {
  std::vector<Case> cases = verification_cases();
  std::erase_if(cases, [](const Case& one) { return one.dtype == DType::kFloat32; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, RegistryForward, testing::ValuesIn(cases_of_the_gpu()), test_name);

std::vector<Case> integer_cases() {
  std::vector<Case> cases;
  for (const Case& one : cases_of_the_gpu())
    if (has_integer_form(one)) cases.push_back(integer_form(one));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, IntegersForward, testing::ValuesIn(integer_cases()), test_name);

// A limit of the kernels that arguments exceed is reported before anything is written.
TEST(RefusedByTheGpu, IsReportedFirst) {
  Case one = named_case("swiglu/bfloat16");
  one.dH_over_H = true;
  Problem problem(make_inputs(one, 1), cuda_memory());
  const auto spread = [&](auto matrices) {  // rows 4 GiB apart
    matrices.stride[1] = int64_t{1} << 31, matrices.stride[0] = one.d * matrices.stride[1];
    return matrices;
  };
  const auto expect_refused = [](const auto& call, const char* name) {
    try {
      call();
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  };
  problem.poison();
  problem.route();
  ForwardArgs forward = problem.forward_args();
  forward.weights.W2 = spread(forward.weights.W2);
  expect_refused([&] { problem.experts().forward(forward); }, " weights.W2 has a row");
  EXPECT_TRUE(problem.H_is_poisoned());

  problem.forward();
  const std::vector<uint64_t> before = problem.fingerprints();
  BackwardArgs backward = problem.backward_args();
  backward.dweights.W2 = spread(backward.dweights.W2);
  expect_refused([&] { problem.experts().backward(backward); }, " dweights.W2 has a row");
  EXPECT_EQ(problem.outputs_other_than(before), std::vector<std::string>());
  problem.backward();  // the saved state is still that of forward
  EXPECT_EQ(problem.damage(), std::vector<std::string>());
}

// Tiles of other sizes sum in the same order.
TEST(ColumnBlocks, GiveTheBitsOfTheWhole) {
  for (const char* name : {"column-blocks/bfloat16", "column-blocks-transposed/float16",
                           "column-blocks-split/bfloat16"}) {
    SCOPED_TRACE(name);
    Case cut = named_case(name), whole = named_case(name);
    whole.column_blocks = 0;
    const auto run = [](const Case& one) {
      Problem problem(make_inputs(one, 1), cuda_memory());
      problem.run();
      EXPECT_TRUE(problem.damage().empty());
      return problem.computed();
    };
    expect_same_bits(run(cut), run(whole));
  }
}

TEST(TwoCalls, GiveTheBitsOfOne) {
  for (const char* name : {"biases/bfloat16", "gpt-oss/float16", "general/bfloat16",
                           "grouped/float16", "many-pairs/bfloat16", "column-blocks/bfloat16"})
    expect_the_bits_of_one_call(named_case(name), &Case::in_two_calls, cuda_memory());
}

TEST(Parts, GiveTheBitsOfOne) {
  for (const char* name :
       {"biases/bfloat16", "gpt-oss/float16", "general/bfloat16", "rounded-nearest/bfloat16",
        "many-pairs/bfloat16", "long-experts/bfloat16", "column-blocks/float16"})
    expect_the_bits_of_one_call(named_case(name), &Case::in_parts, cuda_memory());
}

TEST(GemmsApart, GiveTheBitsOfALayerWithTheIdentity) {
  for (const char* name :
       {"mm/bfloat16", "mm-transposed/float16", "mm-column-blocks/bfloat16",
        "mm-spare-capacity/float16", "mm-general/bfloat16", "mm-grouped/bfloat16"}) {
    Case one = named_case(name);
    ASSERT_TRUE(one.gemms_apart);
    one.gemms_apart = false;
    expect_the_bits_of_one_call(one, &Case::gemms_apart, cuda_memory());
  }
}

// More tiles than CTAs, for every tile size; also experts that are long enough for split-K.
TEST(CtasPerSm, GiveTheSameBits) {
  const int64_t T = reduced_run() ? 700 : 4200;
  const Case even{.name = "even",
                  .T = T,
                  .d = 1032,
                  .n = 520,
                  .E = 9,
                  .K = 3,
                  .dtype = DType::kBFloat16,
                  .biases = true};
  Case uneven = even, plain = even;
  uneven.name = "uneven", uneven.load = Load::kOneExpert, uneven.dtype = DType::kFloat16;
  plain.name = "plain", plain.activation = Activation::kGELU;
  for (const Case& one : {even, uneven, plain}) {
    SCOPED_TRACE(one.name);
    const auto run = [&](int turns) {
      Problem problem(make_inputs(one, 1), cuda_memory());
      problem.poison();
      problem.route();
      ForwardArgs forward = problem.forward_args();
      BackwardArgs backward = problem.backward_args();
      forward.block_turns = backward.block_turns = turns;
      problem.experts().forward(forward);
      problem.experts().backward(backward);
      EXPECT_TRUE(problem.damage().empty());
      return problem.computed();
    };
    const auto expected = run(1);
    for (int turns : {2, 4, 16}) expect_same_bits(run(turns), expected);
  }
}

}  // namespace
}  // namespace tilemoe::verify

namespace tilemoe::test {
namespace {

constexpr int kRepeats = 50;  // of a layer on each of two devices

// The outputs of a layer with that routing when nothing else runs.
DeviceLayer::Bits alone(DeviceLayer& layer, uint64_t logits) {
  layer.write_logits(logits);
  layer.poison();
  layer.enqueue(nullptr);
  DeviceLayer::Bits bits = layer.bits();
  EXPECT_TRUE(layer.is_whole());
  return bits;
}

TEST(DeviceLayerTest, GivesTheSameBitsOnABusyGpu) {
  const int repeats = verify::reduced_run() ? 10 : 1000;
  DeviceLayer layer(1), other(2, {.T = 900, .d = 520, .n = 136, .E = 5, .K = 2});
  const DeviceLayer::Bits expected = alone(layer, 7);
  const Stream stream, busy;
  for (int i = 0; i < repeats; ++i) {
    layer.poison();
    for (int j = 0; j <= i % 3; ++j) other.enqueue(busy.get());
    layer.enqueue(stream.get());
    ASSERT_TRUE(layer.bits() == expected) << "run " << i;
  }
}

TEST(DeviceLayerTest, RunsOnTwoStreamsAtOnce) {
  const int repeats = verify::reduced_run() ? 3 : 50;
  std::array<DeviceLayer, 2> layers{DeviceLayer(1), DeviceLayer(5)};
  const std::array expected{alone(layers[0], 7), alone(layers[1], 8)};
  ASSERT_FALSE(expected[0] == expected[1]);
  for (DeviceLayer& layer : layers) layer.poison();
  std::array<std::exception_ptr, 2> errors;
  const auto run = [&](size_t i) {
    try {
      const Stream stream;
      for (int repeat = 0; repeat < repeats; ++repeat) layers[i].enqueue(stream.get());
      check_cuda(cudaStreamSynchronize(stream.get()));
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::thread first(run, 0), second(run, 1);
  first.join();
  second.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  for (size_t i = 0; i < layers.size(); ++i) EXPECT_TRUE(layers[i].bits() == expected[i]) << i;
}

// Captured with one routing, replayed with others: everything that depends on it is on the device.
TEST(DeviceLayerTest, IsCapturedAndReplayedWithAnotherRouting) {
  DeviceLayer layer(1);
  const std::array<uint64_t, 3> routings{7, 8, 9};
  std::vector<DeviceLayer::Bits> expected;
  for (const uint64_t routing : routings) expected.push_back(alone(layer, routing));
  ASSERT_FALSE(expected[0] == expected[1]);

  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  layer.enqueue(stream.get());
  check_cuda(cudaStreamEndCapture(stream.get(), &graph));
  check_cuda(cudaGraphInstantiate(&replay, graph, 0));
  for (size_t i = 0; i < routings.size(); ++i) {
    layer.write_logits(routings[i]);
    layer.poison();
    check_cuda(cudaDeviceSynchronize());
    check_cuda(cudaGraphLaunch(replay, stream.get()));
    EXPECT_TRUE(layer.bits() == expected[i]) << "routing " << i;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

TEST(DeviceLayerTest, GivesTheSameBitsOnEveryDevice) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "this machine has one GPU";
  std::vector<DeviceLayer::Bits> bits;
  for (int device = 0; device < count; ++device) {
    check_cuda(cudaSetDevice(device));
    DeviceLayer layer(1);
    bits.push_back(alone(layer, 7));
  }
  check_cuda(cudaSetDevice(0));
  for (const DeviceLayer::Bits& one : bits) EXPECT_TRUE(one == bits.front());
}

// A thread for each device; their launches run in parallel.
TEST(DeviceLayerTest, RunsOnTwoDevicesAtOnce) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "this machine has one GPU";
  DeviceLayer reference(1);
  const std::array expected{alone(reference, 7), alone(reference, 8)};
  ASSERT_FALSE(expected[0] == expected[1]);
  std::array<std::exception_ptr, 2> errors;
  std::array<int, 2> equal{};
  const auto run = [&](size_t i) {
    try {
      check_cuda(cudaSetDevice(static_cast<int>(i)));
      DeviceLayer layer(1);
      layer.write_logits(7 + i);
      check_cuda(cudaDeviceSynchronize());
      const Stream stream;
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        layer.poison();
        check_cuda(cudaDeviceSynchronize());
        layer.enqueue(stream.get());
        equal[i] += layer.bits() == expected[i];
      }
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::thread first(run, 0), second(run, 1);
  first.join();
  second.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  for (size_t i = 0; i < equal.size(); ++i) EXPECT_EQ(equal[i], kRepeats) << "device " << i;
}

}  // namespace
}  // namespace tilemoe::test
