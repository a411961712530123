#include "digest.h"

#include <bit>

namespace tilemoe::verify {
namespace {

class Fnv1a {
 public:
  void add(uint32_t word) {
    for (int shift = 0; shift < 32; shift += 8)
      hash_ = (hash_ ^ (word >> shift & 0xff)) * 0x100000001b3u;
  }
  void add(const std::vector<float>& numbers) {
    for (const float number : numbers) add(std::bit_cast<uint32_t>(number));
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

uint64_t digest_of(const Inputs& inputs) {
  Fnv1a digest;
  for (const auto* numbers : {&inputs.X,
                              &inputs.dO,
                              &inputs.O_addend,
                              &inputs.dX_addend,
                              &inputs.weights.W1,
                              &inputs.weights.W2,
                              &inputs.weights.b1,
                              &inputs.weights.b2,
                              &inputs.dW_before.W1,
                              &inputs.dW_before.W2,
                              &inputs.dW_before.b1,
                              &inputs.dW_before.b2,
                              &inputs.logits,
                              &inputs.scores,
                              &inputs.lora.A1,
                              &inputs.lora.B1,
                              &inputs.lora.A2,
                              &inputs.lora.B2,
                              &inputs.dlora_before.A1,
                              &inputs.dlora_before.B1,
                              &inputs.dlora_before.A2,
                              &inputs.dlora_before.B2})
    digest.add(*numbers);
  for (const auto* numbers : {&inputs.tokens, &inputs.experts, &inputs.bad_pairs})
    for (const int64_t number : *numbers) digest.add(static_cast<uint32_t>(number));
  return digest.hash();
}

}  // namespace

uint64_t digest_of(const std::vector<float>& numbers) {
  Fnv1a digest;
  digest.add(numbers);
  return digest.hash();
}

CaseDigests digests_of(const Inputs& inputs, const Computed& computed, Passes passes) {
  CaseDigests digests{.inputs = digest_of(inputs), .tensors = {}};
  for (int i = 0; i < kOutputs; ++i) {
    const auto output = static_cast<Output>(i);
    if (!wanted(inputs.test_case, output)) continue;
    if (passes == Passes::kForward && !of_forward(output)) continue;
    digests.tensors.push_back({.output = output, .hash = digest_of(computed[output])});
  }
  return digests;
}

CaseDigests digest_case(const Case& test_case, uint64_t seed, Memory& memory, Passes passes) {
  const Inputs inputs = make_inputs(test_case, seed);
  Problem problem(inputs, memory);
  problem.run(passes);
  return digests_of(inputs, problem.computed(), passes);
}

std::string hexadecimal(uint64_t hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[hash >> shift & 15];
  return text;
}

}  // namespace tilemoe::verify
