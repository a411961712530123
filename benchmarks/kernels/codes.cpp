// Forward of layers with quantised weights: GEMMs that read codes next to GEMMs that read dequantised
// values, and next to the layer of 16-bit weights, interleaved.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cuda/weight_codes.h"
#include "modes.h"
#include "timed_layer.h"

namespace tilemoe::app {
namespace {

using verify::Case;

// A number of rows that no expert exceeds: every weight whose layout allows it is read as codes.
constexpr int64_t kAnyRows = int64_t{1} << 32;

std::vector<std::byte> output_of(const TimedLayer& layer) {
  const Tensor& O = layer.tensors().O;
  std::vector<std::byte> bytes(size_of(layer.layer().dtype) *
                               static_cast<size_t>(O.shape[0] * O.shape[1]));
  layer.memory().copy_out(bytes.data(), O.data, bytes.size());
  return bytes;
}

void time_layer(const Case& one, const Request& request, Clock& clock, Report& report) {
  if (one.format_1 == Format::kNone)
    throw std::runtime_error(one.name + ": --codes requires --quantized");
  Case plain = one;
  plain.format_1 = plain.format_2 = Format::kNone;
  TimedLayer quantized(one, request.device), in_16_bits(plain, request.device);
  const auto forward = [&](int64_t max_rows) {
    cuda::set_max_rows_of_codes(max_rows);
    quantized.forward();
  };
  const std::vector<Samples> ms = interleaved_ms(
      clock, {[&] { forward(kAnyRows); }, [&] { forward(0); }, [&] { in_16_bits.forward(); }},
      request.rounds);
  forward(kAnyRows);
  const std::vector<std::byte> of_codes = output_of(quantized);
  forward(0);
  const bool equal = of_codes == output_of(quantized);
  cuda::set_max_rows_of_codes({});

  const double codes = median(ms[0]), values_read = median(ms[1]), plain_ms = median(ms[2]);
  Values values = shape_values(one);
  values["rows_an_expert"] = static_cast<double>(quantized.rows()) / static_cast<double>(one.E);
  values["codes_ms"] = triple(quartiles(ms[0]));
  values["dequantised_ms"] = triple(quartiles(ms[1]));
  values["16_bits_ms"] = triple(quartiles(ms[2]));
  values["codes_over_dequantised"] = codes / values_read;
  values["codes_over_16_bits"] = codes / plain_ms;
  values["equal_bits"] = equal;
  std::printf("%s\n", Values{{"name", "codes/" + one.name}, {"values", values}}.dump().c_str());
  std::fflush(stdout);
  report.add("codes/" + one.name, std::move(values));
}

}  // namespace

void time_codes(const Request& request, Report& report) {
  const std::unique_ptr<Clock> clock = make_clock(request.device);
  for (const Case& one : request.layers) time_layer(one, request, *clock, report);
}

}  // namespace tilemoe::app
