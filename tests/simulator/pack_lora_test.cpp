// Packing of the factors of adapters on a simulated GPU: the bits of a rounded product, for every
// float type and strides that occur.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/cuda_backend.h"
#include "lora_problem.h"

namespace tilemoe::test {
namespace {

// One side of a copy (E, a, b).
struct Strides {
  const char* name;
  std::vector<int64_t> (*of)(const Index& shape);
};

// Along b, along a; along the experts, as PEFT stores B; columns of a wider factor.
constexpr Strides kStrides[] = {
    {"along_b",
     [](const Index& n) {
       return std::vector{n[1] * n[2], n[2], int64_t{1}};
     }},
    {"along_a",
     [](const Index& n) {
       return std::vector{n[1] * n[2], int64_t{1}, n[1]};
     }},
    {"along_experts",
     [](const Index& n) {
       return std::vector{int64_t{1}, n[2] * n[0], n[0]};
     }},
    {"slice_along_b",
     [](const Index& n) {
       return std::vector{n[1] * (n[2] + 24), n[2] + 24, int64_t{1}};
     }},
    {"slice_along_a",
     [](const Index& n) {
       return std::vector{n[2] * (n[1] + 24), int64_t{1}, n[1] + 24};
     }},
};

struct Copy {
  Index shape;
  const Strides *from, *to;  // from null: absent
  tilemoe_dtype from_dtype;
  float scale;
};

void run(tilemoe_dtype dtype, const std::vector<Copy>& copies) {
  std::vector<std::unique_ptr<PlacedTensor>> from, to;
  const auto place = [](tilemoe_dtype type, const Index& shape, const Strides& strides) {
    return std::make_unique<PlacedTensor>(type, std::vector<int64_t>(shape.begin(), shape.end()),
                                          strides.of(shape), 8, 40);
  };
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = dtype, experts.E = copies[0].shape[0];
  LoraPacking packing{};
  for (const Copy& copy : copies) {
    from.push_back(copy.from ? place(copy.from_dtype, copy.shape, *copy.from) : nullptr);
    to.push_back(place(dtype, copy.shape, *copy.to));
    // Products that a 16-bit number rounds.
    if (from.back()) from.back()->fill([](const Index& i) { return 0.37 * whole(i, 1, 300); });
    packing.copy[packing.count++] = {from.back() ? from.back()->tensor() : tilemoe_tensor{},
                                     to.back()->tensor(), copy.scale};
  }
  cuda::backend().pack_lora(experts, packing, nullptr);
  expect_clean_run();
  for (size_t i = 0; i < copies.size(); ++i)
    to[i]->expect("copy " + std::to_string(i), [&](const Index& at) {
      return from[i] ? static_cast<double>(copies[i].scale * static_cast<float>(from[i]->at(at)))
                     : 0.0;
    });
}

class PackLora : public testing::TestWithParam<tilemoe_dtype> {};

TEST_P(PackLora, TakesAnyStridesAndTypes) {
  simulate("sm80");
  for (const Strides& from : kStrides)
    for (const Strides& to : kStrides) {
      if (std::string(to.name) == "along_experts") continue;
      for (const tilemoe_dtype type : {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16}) {
        SCOPED_TRACE(std::string(from.name) + " to " + to.name + ", " + tilemoe_dtype_name(type));
        run(GetParam(), {{{3, 72, 16}, &from, &to, type, 1.7f}});
      }
    }
}

// Of one dtype, since sizes do not depend on it.
TEST(PackLoraSizes, OfManyAndOfFewElements) {
  simulate("sm80");
  for (const Index& shape : {Index{1, 1, 1}, Index{1, 8, 8}, Index{2, 8, 5000}, Index{2, 5000, 8},
                             Index{70, 80, 8}, Index{2, 256, 72}, Index{1, 16, 1}})
    for (const Strides& from : kStrides)
      for (const Strides& to : {kStrides[0], kStrides[1], kStrides[3]}) {
        SCOPED_TRACE(testing::Message() << from.name << " to " << to.name << " of " << shape[0]
                                        << ", " << shape[1] << ", " << shape[2]);
        run(TILEMOE_BFLOAT16, {{shape, &from, &to, TILEMOE_FLOAT32, 0.5f}});
      }
}

// All factors of a split gate with adapters of its own, one of which is absent.
TEST_P(PackLora, MakesEveryCopyOfACall) {
  simulate("sm80");
  const Strides &b = kStrides[0], &a = kStrides[1], &experts = kStrides[2], &slice = kStrides[3];
  run(GetParam(), {{{3, 16, 136}, &b, &b, TILEMOE_FLOAT32, 1},
                   {{3, 72, 16}, &experts, &slice, TILEMOE_FLOAT32, 2.3f},
                   {{3, 72, 8}, nullptr, &slice, TILEMOE_FLOAT32, -1},
                   {{3, 8, 136}, &a, &b, TILEMOE_BFLOAT16, 1},
                   {{3, 72, 16}, nullptr, &a, TILEMOE_FLOAT32, 1},
                   {{3, 72, 8}, &b, &slice, TILEMOE_FLOAT16, 0.3f},
                   {{3, 16, 72}, &b, &a, TILEMOE_FLOAT32, 1},
                   {{3, 136, 16}, &experts, &b, TILEMOE_FLOAT32, 0.7f}});
}

INSTANTIATE_TEST_SUITE_P(, PackLora, testing::Values(TILEMOE_BFLOAT16, TILEMOE_FLOAT16),
                         [](const auto& given) { return tilemoe_dtype_name(given.param); });

}  // namespace
}  // namespace tilemoe::test
