// A case in a device's memory, run through the library's public interface.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fp8_H.h"
#include "inputs.h"
#include "lora_tensors.h"
#include "memory.h"
#include "mm_calls.h"
#include "parts.h"
#include "quantized_tensors.h"
#include "reference.h"
#include "tilemoe/layer.h"
#include "weights.h"

namespace tilemoe::verify {

enum class Passes {
  kForward,  // route, forward
  kAll,      // route, forward and backward
};

using Computed = std::array<std::vector<float>, kOutputs>;

// Owns every tensor and workspace that the case needs, each of exactly the size that the library
// requires, between guards. Call route, forward and backward in this order, or run() for all.
class Problem {
 public:
  explicit Problem(const Inputs& inputs, Memory& memory = host_memory());
  ~Problem();
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  // Fills outputs, saved state, routing and workspaces with NaN, or with the values that gradients
  // are added to.
  void poison();
  void route();
  void forward();
  void infer();  // writes O alone
  void backward();
  // Calls poison(), then the passes.
  void run(Passes passes = Passes::kAll);

  // The pairs that route() built, derived independently from ids, triples or counts; those of
  // rounded routing are read from the routing itself.
  std::vector<Pair> pairs() const;
  // The outputs, laid out as the reference's Results; H as forward left it.
  Computed computed() const;
  // Whether H was not written since it was poisoned.
  bool H_is_poisoned() const { return H_->is_poisoned(); }
  // A hash of the bits of each output, H included.
  std::vector<uint64_t> fingerprints() const;
  // Names of the outputs that have other fingerprints than these.
  std::vector<std::string> outputs_other_than(const std::vector<uint64_t>& fingerprints) const;
  // A line for each input that changed, and for each byte written outside an output.
  std::vector<std::string> damage();

  const Experts& experts() const { return experts_; }
  const RoutingSpec& spec() const { return spec_; }
  const Routing& routing() const { return *routing_; }
  Saved& saved() { return saved_; }
  ForwardArgs forward_args();  // with saved
  BackwardArgs backward_args();
  // Backward in two calls: ds, dW2 and db2; then the rest, from the dH that the first call left.
  struct BackwardCalls {
    BackwardArgs first, second;
  };
  BackwardCalls backward_calls();
  // Four parts of a routing that has been built.
  Parts parts() const;

 private:
  struct NamedTensor {
    std::string name;
    GuardedTensor* tensor;
  };
  struct Input {
    NamedTensor tensor;
    uint64_t fingerprint;
  };

  void add_input(const char* name, std::optional<GuardedTensor>& place, DType dtype,
                 std::vector<int64_t> shape, const std::vector<float>& values,
                 MatrixLayout layout = {});
  void choose_experts();
  void pack_lora();
  std::vector<Pair> rounded_pairs() const;
  std::vector<float> read_H() const;  // gate columns, then up columns
  void give_H(bool memory_of_dH);     // in `saved_`, for a call
  // `buffer` of exactly `bytes` bytes
  static void* sized(std::unique_ptr<GuardedBuffer>& buffer, size_t bytes, Memory& memory);

  const Inputs in_;
  const Case& case_;
  Memory& memory_;
  Experts experts_;
  RoutingSpec spec_;

  std::optional<GuardedTensor> X_, dO_, O_addend_, dX_addend_, logits_;
  std::optional<GuardedTensor> ids_, tokens_, scores_, counts_, seed_, step_;
  std::optional<GuardedTensor> chosen_scores_;  // what top_k wrote
  WeightTensors weights_;
  QuantizedTensors quantized_;
  QuantizedWeights quantized_view_;
  LoraTensors lora_;
  GuardedBuffer packed_memory_;
  tilemoe_packed_lora packed_ = {};
  uint64_t packed_fingerprint_ = 0;
  std::vector<Input> inputs_;

  std::optional<GuardedTensor> O_, H_, P1_, P2_, dX_, ds_;
  CodesOfH codes_of_H_;  // given: H_ is the memory of dH alone
  std::optional<WeightTensors> dweights_;
  std::optional<LoraTensors> dlora_;
  std::vector<NamedTensor> outputs_;
  std::vector<float> H_of_forward_;  // set if backward writes over H

  GuardedBuffer routing_memory_;
  std::optional<Routing> routing_;
  Saved saved_;
  std::optional<MmCalls> mm_;  // of a case with gemms_apart
  std::unique_ptr<GuardedBuffer> routing_workspace_, forward_workspace_, backward_workspace_;
};

}  // namespace tilemoe::verify
