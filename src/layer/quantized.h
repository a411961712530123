// Quantised weights in the calls of the layer: read, checked, and dequantised into the workspace
// before the steps that read them, one block of experts after another (docs/kernels.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/backend.h"
#include "core/overlap.h"
#include "layer/steps.h"

namespace tilemoe {

const char* format_name(tilemoe_format format) noexcept;

// The quantised weights of a call, or zeros without any. Throws unless they are those of
// experts.format_1 and format_2, with all arrays that their formats have. Transposed weights may be
// given in the recipe fp8, and have to be given if the call reads them.
tilemoe_quantized_weights read_quantized(const tilemoe_quantized_weights* given,
                                         const tilemoe_experts& experts, bool reads_transposed);
void read_quantized_memory(MemoryUse& memory, const tilemoe_quantized_weights& quantized,
                           const tilemoe_experts& experts);

// `weights` with the shapes and strides of those that are quantised. They have no data: where a
// step reads data, WeightBlocks below has it.
tilemoe_weights with_dequantized(tilemoe_weights weights, const tilemoe_experts& experts,
                                 const tilemoe_quantized_weights& quantized);
// `weights` of a caller who need not give quantised ones: an absent one is contiguous in its shape.
tilemoe_weights with_shapes(tilemoe_weights weights, const tilemoe_experts& experts);

// The TILEMOE_GRADIENT_ bits of quantised weights, which no call may request: none in fp8 recipes.
uint32_t quantized_gradients(const tilemoe_experts& experts);
void check_no_quantized_gradients(const tilemoe_experts& experts, const tilemoe_weights& gradients);

// Bytes of one block of experts in 16 bits, or in float32: of W1 and W1_up, and of W2. 0 if they
// are not quantised.
size_t dequantized_bytes_1(const tilemoe_experts& experts);
size_t dequantized_bytes_2(const tilemoe_experts& experts);

// The experts that a step reads at a time, with their rows.
struct ExpertBlock {
  int64_t first;
  Rows rows;  // E: the experts of the block

  // Those of (E, ...), as of a bias or a factor. An absent tensor stays absent.
  tilemoe_tensor of(const tilemoe_tensor& tensor) const { return slice(tensor, 0, first, rows.E); }
};

// The weights of a call for the steps that read them. A quantised weight is dequantised into the
// workspace block by block, for the experts with rows alone; the others are whole.
class WeightBlocks {
 public:
  struct Call {
    const StepRunner& run;
    const tilemoe_experts& experts;
    const tilemoe_quantized_weights& quantized;
    const tilemoe_weights& weights;  // with_dequantized()
    char* workspace;
    void* stream;
    CodesRead codes = {};  // weights whose steps read codes: these are not dequantised
  };
  explicit WeightBlocks(const Call& call) : call_(call) {}

  // body(block, UpWeights) for each block of experts, with W1 at `place` of the workspace. `again`:
  // an earlier call has left W1 there, for the same rows. One block without data has all experts if
  // the steps read codes.
  template <class Body>
  void for_each_W1(StepRow<Dequantize> Steps::*step, size_t place, const Rows& rows, bool again,
                   const Body& body) const {
    for_each(format_1(), rows, [&](const ExpertBlock& block, bool whole) {
      body(block, up_weights(step, place, block, again && whole));
    });
  }
  // The same with W2: body(block, W2).
  template <class Body>
  void for_each_W2(StepRow<Dequantize> Steps::*step, size_t place, const Rows& rows, bool again,
                   const Body& body) const {
    for_each(format_2(), rows, [&](const ExpertBlock& block, bool whole) {
      body(block, down_weight(step, place, block, again && whole));
    });
  }

  // The codes for those steps; none for steps that read values. `first_row` as in WeightCodes.
  WeightCodes codes_1(int64_t first_row = 0) const {
    return call_.codes.W1 ? WeightCodes{call_.quantized.W1, call_.quantized.W1_up, first_row}
                          : WeightCodes{};
  }
  WeightCodes codes_2(int64_t first_row) const {
    return call_.codes.W2 ? WeightCodes{call_.quantized.W2, {}, first_row} : WeightCodes{};
  }

  // Formats of the weights that are dequantised.
  tilemoe_format format_1() const {
    return call_.codes.W1 ? TILEMOE_FORMAT_NONE : call_.experts.format_1;
  }
  tilemoe_format format_2() const {
    return call_.codes.W2 ? TILEMOE_FORMAT_NONE : call_.experts.format_2;
  }

 private:
  template <class Body>
  void for_each(tilemoe_format format, const Rows& rows, const Body& body) const;

  UpWeights up_weights(StepRow<Dequantize> Steps::*step, size_t place, const ExpertBlock& block,
                       bool again) const;
  tilemoe_tensor down_weight(StepRow<Dequantize> Steps::*step, size_t place,
                             const ExpertBlock& block, bool again) const;
  tilemoe_tensor dequantized(StepRow<Dequantize> Steps::*step, const tilemoe_quantized& weight,
                             const tilemoe_tensor& shape, size_t place, const ExpertBlock& block,
                             bool again) const;

  const Call call_;
};

// Experts of a block.
int64_t block_experts(const tilemoe_experts& experts, tilemoe_format format);

template <class Body>
void WeightBlocks::for_each(tilemoe_format format, const Rows& rows, const Body& body) const {
  const int64_t count = block_experts(call_.experts, format);
  for_each_block(rows.E, count, [&](int64_t first, int64_t experts) {
    ExpertBlock block{first, rows};
    block.rows.E = experts;
    block.rows.offsets += first;
    if (rows.ends != nullptr) block.rows.ends += first;
    body(block, count == rows.E);
  });
}

// tilemoe_dequantize().
void dequantize(const tilemoe_dequantize_args* args);

}  // namespace tilemoe
