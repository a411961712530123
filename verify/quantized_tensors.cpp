#include "quantized_tensors.h"

#include <cstring>
#include <utility>

namespace tilemoe::verify {

QuantizedTensors::QuantizedTensors(const Inputs& inputs, Memory& memory)
    : case_(inputs.test_case), memory_(memory) {
  if (case_.format_1 != Format::kNone) {
    W1_ = place("W1", inputs.quantized.W1, case_.W1_transposed);
    if (case_.gate_layout == GateLayout::kSplit)
      W1_up_ = place("W1_up", inputs.quantized.W1_up, case_.W1_transposed);
  }
  if (case_.format_2 != Format::kNone) W2_ = place("W2", inputs.quantized.W2, case_.W2_transposed);
  if (case_.recipe != Recipe::kFp8) return;
  W1_transposed_ = place("W1_transposed", transposed(inputs.quantized.W1), true);
  if (case_.gate_layout == GateLayout::kSplit)
    W1_up_transposed_ = place("W1_up_transposed", transposed(inputs.quantized.W1_up), true);
  W2_transposed_ = place("W2_transposed", transposed(inputs.quantized.W2), true);
}

template <class Element>
const Element* QuantizedTensors::place(const std::string& name,
                                       const std::vector<Element>& values) {
  if (values.empty()) return nullptr;
  std::vector<std::byte> bytes(values.size() * sizeof(Element));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  GuardedBuffer buffer(memory_, bytes.size());
  buffer.write(bytes);
  const uint64_t fingerprint = buffer.fingerprint();
  arrays_.push_back({name, std::move(buffer), fingerprint});
  return static_cast<const Element*>(arrays_.back().buffer.data());
}

Quantized QuantizedTensors::place(const char* name, const QuantizedArrays& arrays,
                                  bool transposed) {
  return placed(arrays, transposed, [&](const char* field, const auto& values) {
    return place(std::string(name) + "." + field, values);
  });
}

QuantizedWeights QuantizedTensors::view() const {
  return QuantizedWeights(W1_, W2_, W1_up_)
      .transposed(W1_transposed_, W2_transposed_, W1_up_transposed_);
}

Weights QuantizedTensors::with_shapes(Weights weights) const {
  const auto shape = [&](int64_t rows, int64_t columns, bool transposed) {
    if (!transposed) return ConstTensor(nullptr, case_.dtype, {case_.E, rows, columns});
    return ConstTensor(nullptr, case_.dtype, {case_.E, columns, rows}).transposed();
  };
  const bool split = case_.gate_layout == GateLayout::kSplit;
  if (W1_.codes != nullptr)
    weights.W1 = shape(split ? case_.n : case_.h_width(), case_.d, case_.W1_transposed);
  if (W1_up_.codes != nullptr) weights.W1_up = shape(case_.n, case_.d, case_.W1_transposed);
  if (W2_.codes != nullptr) weights.W2 = shape(case_.d, case_.n, case_.W2_transposed);
  return weights;
}

std::vector<std::string> QuantizedTensors::damage() const {
  std::vector<std::string> lines;
  for (const Array& array : arrays_)
    if (array.buffer.fingerprint() != array.fingerprint)
      lines.push_back("the input " + array.name + ", or a byte next to it, was changed");
  return lines;
}

}  // namespace tilemoe::verify
