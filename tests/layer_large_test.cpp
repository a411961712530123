// Operands that extend past 2^31 elements: strides so large that most of the address range is never
// touched. (M, d) and (M, 2n) tensors of that size are the registry's huge cases, run by name.
#include <sys/mman.h>

#include <cerrno>

#include "layer_support.h"

namespace tilemoe::verify {
namespace {

constexpr int64_t kIndexLimit = int64_t{1} << 31;

// Pages that are not touched take no memory.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED)
      throw std::runtime_error("mmap of " + std::to_string(bytes) +
                               " bytes: " + std::strerror(errno));
  }
  ~SparseMemory() { munmap(memory_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  void* data() const { return memory_; }

 private:
  void* memory_;
  size_t bytes_;
};

// A copy of a tensor whose outermost stride takes its last index past 2^31 elements.
class SpreadTensor {
 public:
  explicit SpreadTensor(const Tensor& dense)
      : dense_(dense), spread_(spread(dense)), memory_(bytes()) {
    spread_.data = memory_.data();
    for_each([](std::byte* there, const std::byte* here, size_t size) {
      std::memcpy(there, here, size);
    });
  }
  const Tensor& view() const { return spread_; }

  void poison() {
    for_each([](std::byte* there, const std::byte*, size_t size) { std::memset(there, -1, size); });
  }
  bool equals_the_dense_one() const {
    bool equal = true;
    for_each([&](const std::byte* there, const std::byte* here, size_t size) {
      equal = equal && std::memcmp(there, here, size) == 0;
    });
    return equal;
  }

 private:
  static Tensor spread(Tensor tensor) {
    if (tensor.shape[0] < 2) throw std::runtime_error("one row cannot be spread");
    constexpr int64_t kStrideMultiple = 8;
    tensor.stride[0] =
        (kIndexLimit / (tensor.shape[0] - 1) / kStrideMultiple + 1) * kStrideMultiple;
    return tensor;
  }
  size_t element() const { return tilemoe_dtype_size(spread_.dtype); }
  size_t bytes() const {
    return static_cast<size_t>(spread_.shape[0] * spread_.stride[0]) * element();
  }
  // Calls visit(place in the spread tensor, place in the dense one, bytes).
  template <class Visit>
  void for_each(Visit&& visit) const {
    const int64_t rows = dense_.ndim == 3 ? dense_.shape[1] : 1;
    const int64_t row_stride = dense_.ndim == 3 ? dense_.stride[1] : 0;
    const int64_t last = dense_.ndim - 1;
    for (int64_t i = 0; i < dense_.shape[0]; ++i)
      for (int64_t j = 0; j < rows; ++j)
        for (int64_t k = 0; k < dense_.shape[last]; ++k) {
          const auto at = [&](const Tensor& tensor) {
            return static_cast<std::byte*>(tensor.data) +
                   static_cast<size_t>(i * tensor.stride[0] + j * row_stride +
                                       k * tensor.stride[last]) *
                       element();
          };
          visit(at(spread_), at(dense_), element());
        }
  }

  Tensor dense_, spread_;
  SparseMemory memory_;
};

class LayerLarge : public testing::TestWithParam<Case> {};

TEST_P(LayerLarge, StridesPast32Bits) {
  Problem problem(make_inputs(GetParam(), 9));
  problem.run();
  ForwardArgs forward = problem.forward_args();
  BackwardArgs backward = problem.backward_args();

  std::vector<std::unique_ptr<SpreadTensor>> inputs, outputs;
  const auto replace = [](tilemoe_tensor& tensor, auto& list) {
    if (tensor.ndim == 0) return;
    list.push_back(std::make_unique<SpreadTensor>(Tensor(tensor)));
    tensor = list.back()->view();
  };
  for (tilemoe_tensor* tensor :
       {&forward.X, &forward.addend, &forward.weights.W1, &forward.weights.W1_up,
        &forward.weights.W2, &forward.weights.b1, &forward.weights.b1_up, &forward.weights.b2,
        &backward.dO, &backward.addend})
    replace(*tensor, inputs);
  backward.X = forward.X;
  backward.weights = forward.weights;
  for (tilemoe_tensor* tensor :
       {&forward.O, &backward.dX, &backward.dweights.W1, &backward.dweights.W1_up,
        &backward.dweights.W2, &backward.dweights.b1, &backward.dweights.b1_up,
        &backward.dweights.b2})
    replace(*tensor, outputs);
  ASSERT_GE(outputs.size(), 6u);
  for (const auto& output : outputs) {
    output->poison();
    EXPECT_FALSE(output->equals_the_dense_one());
  }

  problem.experts().forward(forward);
  problem.experts().backward(backward);
  for (size_t i = 0; i < outputs.size(); ++i)
    EXPECT_TRUE(outputs[i]->equals_the_dense_one()) << "output " << i;
  for (size_t i = 0; i < inputs.size(); ++i)
    EXPECT_TRUE(inputs[i]->equals_the_dense_one()) << "input " << i << " was changed";
}

// The comparison of the registry's largest case, on a layer that fits.
TEST(HiddenLayer, IsComparedWithinACrowd) {
  const Case large{.name = "hidden",
                   .T = 61,
                   .d = 72,
                   .n = 40,
                   .E = 9,
                   .K = 3,
                   .dtype = DType::kBFloat16,
                   .routing = RoutingKind::kGeneral,
                   .huge = true,
                   .too_large = true};
  const Report report = check_case(large, 1);
  expect_passed(report);
  EXPECT_EQ(report.tensors.size(), 5u);  // O, dX, ds, dW1, dW2
}

INSTANTIATE_TEST_SUITE_P(, LayerLarge,
                         testing::ValuesIn(named_cases({"biases", "gpt-oss", "transposed-split",
                                                        "grouped-without-scores"},
                                                       {"float32", "bfloat16"})),
                         test_name);

}  // namespace
}  // namespace tilemoe::verify
