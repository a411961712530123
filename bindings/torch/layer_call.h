// A call of the layer as the operators make it: the views of their tensors, the memory, and the C
// interface's structs. For experts.cpp and lora.cpp.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "operators.h"
#include "packing.h"
#include "quantized.h"

namespace tilemoe_torch {

// The function of the experts.
struct Config {
  Numbers numbers;
  Reals reals;

  Config(const std::vector<int64_t>& its_numbers, const std::vector<double>& its_reals)
      : numbers(unpack<Numbers>("numbers", its_numbers)),
        reals(unpack<Reals>("reals", its_reals)) {}
};

// The experts' weights; W1 and W2 are required. On the CPU a weight that is not on 16 bytes is
// copied, as X is: a memory-mapped checkpoint has tensors on 8. On a GPU the library rejects it: a
// copy in every call would cost a weight's memory and time.
class Weights {
 public:
  Weights(const Call& call, const Tensors& list, const Quantized& its_quantized = {})
      : quantized(its_quantized), shapes_(list), given_(list) {
    for (size_t place : {kW1, kW2})
      if (!list[place]) refuse(std::string(kWeightNames[place]) + " is required");
    for (size_t place = 0; place < kWeights; ++place) {
      MaybeTensor& weight = given_[place];
      if (quantized.of(place)) weight = std::nullopt;
      if (weight && call.device() == TILEMOE_CPU) weight = weight_on_16(*weight);
    }
  }

  // For their shapes: a quantised weight has no data.
  const Tensor& W1() const { return *shapes_[kW1]; }
  const Tensor& W2() const { return *shapes_[kW2]; }
  const Tensors& shapes() const { return shapes_; }
  // Absent if it is quantised.
  const MaybeTensor& operator[](size_t place) const { return given_[place]; }

  const Quantized quantized;

 private:
  Tensors shapes_, given_;
};

// Views of weights, or of their gradients, that begin at `first` and have these names.
tilemoe_weights views(const Call& call, const MaybeTensor* first, const char* const* names);

// Packed low-rank adapters of a call. Without them the ranks are 0.
struct Adapters {
  LoraRanks ranks{};
  LoraScales scales{};
  MaybeTensor packed;
  MaybeTensor P1, P2;  // absent in inference, and without that adapter
  Tensors gradients = Tensors(kFactors);

  bool exist() const { return rank_1() + rank_2() > 0; }
  int32_t rank_1() const { return narrowed<int32_t>("ranks", ranks.gate + ranks.up); }
  int32_t rank_2() const { return narrowed<int32_t>("ranks", ranks.down); }
  void set_ranks(tilemoe_experts& experts) const {
    experts.rank_1 = rank_1(), experts.rank_2 = rank_2();
  }
  void save(const Call& call, tilemoe_saved& saved) const {
    saved.P1 = call.view("P1", P1), saved.P2 = call.view("P2", P2);
  }

  // The C interface's view of the packed memory. The weights' data is not read.
  tilemoe_packed_lora view(const tilemoe_experts& experts, const tilemoe_weights& weights) const {
    size_t bytes = 0;
    check(tilemoe_packed_lora_bytes(&experts, &bytes));
    if (packed->scalar_type() != ScalarType::Byte || !packed->is_contiguous() ||
        static_cast<size_t>(packed->numel()) != bytes)
      refuse("packed has shape " + describe_shape(*packed) + ", expected " + std::to_string(bytes) +
             " bytes");
    tilemoe_packed_lora lora{};
    lora.struct_size = sizeof lora;
    lora.scale_1 = static_cast<float>(scales.of_W1);
    lora.scale_2 = static_cast<float>(scales.of_W2);
    if (experts.gate_layout == TILEMOE_GATE_SPLIT)
      lora.rank_gate = narrowed<int32_t>("ranks", ranks.gate);
    check(tilemoe_packed_lora_bind(&experts, &weights, packed->data_ptr(), bytes, &lora));
    return lora;
  }
};

// Factors, or their gradients, with the names of `lora`.
tilemoe_lora factors(const Call& call, const Tensors& list, const LoraScales& scales);

// The sizes are W2's, whose shape does not depend on the activation and the layout of the gate.
tilemoe_experts experts_of(const Call& call, const Tensor& X, const Weights& weights,
                           const Config& config);
tilemoe_routing_spec spec_of(const Call& call, const Tensor& X, const tilemoe_experts& experts,
                             const Numbers& numbers, int64_t capacity);

size_t workspace_size(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                      tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients);

// Columns of H as it is saved, in elements: of codes, bytes, with those of the scales. All codes come
// first, and then all scales.
int64_t saved_columns(const tilemoe_experts& experts);

// Every gradient of one backward, in the order of their bits; absent ones are not computed.
using Gradients = Tensors;

// Allocates memory for each bit of `wanted`, zeroed if sums are added to it.
void allocate(const Call& call, int64_t wanted, const Tensor& X, const Tensor& H,
              const Weights& weights, const Numbers& numbers, bool accumulate,
              Gradients& gradients);

std::vector<Tensor> in_order(const Gradients& gradients, int64_t wanted);

// Writes O, and H if it is given, else as in inference.
void forward_into(const Call& call, const Tensor& X, const Tensor& routing_tensor,
                  const Weights& weights, const MaybeTensor& addend, const tilemoe_experts& layer,
                  const tilemoe_routing_spec& spec, const tilemoe_part* part, const Tensor& O,
                  const MaybeTensor& H, const Adapters& adapters = {});

// The outputs of `moe`.
std::tuple<Tensor, Tensor, Tensor, Tensor> routed_forward(
    const Call& call, const Tensor& X, const Tensor& logits, const MaybeTensor& selection_bias,
    const Weights& weights, const MaybeTensor& addend, const Config& config, bool keep_H);

// Allocates all memory, the workspace last, before it launches anything, and frees the workspace
// when it returns. A part uses a workspace of the caller, and so do FIRST and the REST that reads
// the dH in its workspace (dH_in_workspace). adds_to_dX: dX is its own addend. H is the memory of dH
// if it is saved as codes, which OVER_H then receives as H_codes; in WHOLE, H are the codes.
void backward(const Call& call, const MaybeTensor& dO, const Tensor& X, const Tensor& H,
              tilemoe_backward_mode mode, const Tensor& routing_tensor, const Weights& weights,
              const Config& config, const Gradients& gradients, bool accumulate,
              const tilemoe_part* part = nullptr, const Tensor* given_workspace = nullptr,
              const Adapters& adapters = {}, bool dH_in_workspace = false, bool adds_to_dX = false,
              const MaybeTensor& H_codes = std::nullopt);

}  // namespace tilemoe_torch
