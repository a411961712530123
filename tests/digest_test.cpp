// Hashes of a case's outputs: they depend on each bit.
#include "verify/digest.h"

#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "verify/registry.h"

namespace tilemoe::verify {
namespace {

float float_of(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

TEST(Digest, IsFnv1a) {
  EXPECT_EQ(digest_of(std::vector<float>{}), 0xcbf29ce484222325u);
  EXPECT_EQ(digest_of({float_of(0x626f6f66)}), 0xdd120e790c2512afu);  // "foob"
}

TEST(Digest, IsWrittenInSixteenDigits) {
  EXPECT_EQ(hexadecimal(0x00ab'cdef'0123'4567), "00abcdef01234567");
}

TEST(Digest, DistinguishesBitsAndPlaces) {
  const std::set<uint64_t> hashes = {digest_of({0.f, 1.f}), digest_of({-0.f, 1.f}),
                                     digest_of({1.f, 0.f}), digest_of({0.f, 1.f, 0.f}),
                                     digest_of({0.f, float_of(0x3f800001)})};
  EXPECT_EQ(hashes.size(), 5u);
}

TEST(Digest, IsOfEveryInputAndOutput) {
  Case one = *find_case("calibration-relu/float16");
  one.addend = one.accumulate_dW = true;
  one.lora.gate = 16, one.lora.down = 8;
  const Inputs inputs = make_inputs(one, 1);
  Problem problem(inputs);
  problem.run();
  Computed computed = problem.computed();
  const CaseDigests before = digests_of(inputs, computed, Passes::kAll);
  ASSERT_EQ(before.tensors.size(), static_cast<size_t>(kOutputs));
  for (size_t i = 0; i < kOutputs; ++i) {
    float& number = computed[i].back();
    const float original = number;
    number = std::bit_cast<float>(std::bit_cast<uint32_t>(number) ^ 1);
    const CaseDigests after = digests_of(inputs, computed, Passes::kAll);
    for (size_t j = 0; j < kOutputs; ++j)
      EXPECT_EQ(after.tensors[j].hash == before.tensors[j].hash, i != j) << i << " " << j;
    number = original;
  }
  std::set<uint64_t> hashes = {before.inputs};
  const auto with = [&](auto&& change) {
    Inputs other = inputs;
    change(other);
    hashes.insert(digests_of(other, computed, Passes::kForward).inputs);
  };
  with([](Inputs& of) { of.X.back() += 1; });
  with([](Inputs& of) { of.dO.back() += 1; });
  with([](Inputs& of) { of.O_addend.back() += 1; });
  with([](Inputs& of) { of.dX_addend.back() += 1; });
  with([](Inputs& of) { of.weights.W1.back() += 1; });
  with([](Inputs& of) { of.weights.W2.back() += 1; });
  with([](Inputs& of) { of.weights.b1.back() += 1; });
  with([](Inputs& of) { of.weights.b2.back() += 1; });
  with([](Inputs& of) { of.dW_before.W1.back() += 1; });
  with([](Inputs& of) { of.dW_before.W2.back() += 1; });
  with([](Inputs& of) { of.dW_before.b1.back() += 1; });
  with([](Inputs& of) { of.dW_before.b2.back() += 1; });
  with([](Inputs& of) { of.lora.A1.back() += 1; });
  with([](Inputs& of) { of.lora.B2.back() += 1; });
  with([](Inputs& of) { of.scores.back() += 1; });
  with([](Inputs& of) { of.tokens.back() += 1; });
  with([](Inputs& of) { of.experts.back() += 1; });
  EXPECT_EQ(hashes.size(), 18u);
}

TEST(Digest, DoesNotSeeHowATensorLies) {
  Case dense = *find_case("calibration-reglu/bfloat16"), padded = dense;
  padded.padded = true;
  const CaseDigests a = digest_case(dense, 1, host_memory()),
                    b = digest_case(padded, 1, host_memory());
  EXPECT_EQ(a.inputs, b.inputs);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) EXPECT_EQ(a.tensors[i].hash, b.tensors[i].hash);
}

}  // namespace
}  // namespace tilemoe::verify
