#include "timed_weights.h"

#include "timed_layer.h"
#include "verify/random.h"

namespace tilemoe::app {

double bytes_per_value(Format format) {
  switch (format) {
    case Format::kFp8: return 1 + 4.0 / (128 * 128);
    case Format::kMxfp4: return 0.5 + 1.0 / 32;
    case Format::kNf4: return 0.5 + 4.0 / 64;
    case Format::kNf4Double: return 0.5 + 1.0 / 64 + 4.0 / (64 * 256);
    case Format::kNvfp4: return 0.5 + 1.0 / 16;
    case Format::kNone: break;
  }
  return 0;
}

template <class Element>
const Element* TimedWeights::place(const std::vector<Element>& values) {
  if (values.empty()) return nullptr;
  const size_t bytes = values.size() * sizeof(Element);
  arrays_.push_back(allocate(memory_, bytes));
  memory_.copy_in(arrays_.back().get(), values.data(), bytes);
  return static_cast<const Element*>(arrays_.back().get());
}

// All weights; those that backward of the fp8 recipe reads have codes of their own.
QuantizedWeights TimedWeights::place(const verify::Case& layer, bool transposed) {
  const bool split = layer.gate_layout == GateLayout::kSplit;
  const bool t1 = transposed || layer.W1_transposed, t2 = transposed || layer.W2_transposed;
  const int64_t rows = split ? layer.n : layer.h_width();
  return QuantizedWeights(place(layer.format_1, t1, rows, layer.d),
                          place(layer.format_2, t2, layer.d, layer.n),
                          split ? place(layer.format_1, t1, layer.n, layer.d) : Quantized{});
}

Quantized TimedWeights::place(Format format, bool transposed, int64_t rows, int64_t columns) {
  if (format == Format::kNone) return {};
  verify::Random random(7, static_cast<uint64_t>(columns));
  const verify::QuantizedArrays arrays =
      transposed ? verify::random_arrays(format, E_, columns, rows, 0.02, random)
                 : verify::random_arrays(format, E_, rows, columns, 0.02, random);
  return verify::placed(arrays, transposed,
                        [&](const char* /*field*/, const auto& values) { return place(values); });
}

TimedWeights::TimedWeights(const verify::Case& layer, verify::Memory& memory)
    : memory_(memory),
      E_(layer.E),
      any_(layer.format_1 != Format::kNone || layer.format_2 != Format::kNone),
      view_(place(layer, false)) {
  if (layer.recipe != Recipe::kFp8) return;
  const QuantizedWeights second = place(layer, true);
  view_.W1_transposed = second.W1, view_.W1_up_transposed = second.W1_up;
  view_.W2_transposed = second.W2;
}

}  // namespace tilemoe::app
