// Quantised weights in the operators' calls, and the operator that dequantises one.
#include "quantized.h"

#include <array>
#include <string>
#include <tuple>

#include "core/formats.h"
#include "operators.h"

namespace tilemoe_torch {
namespace {

// A weight in the order of its codes.
struct Values {
  int64_t E, R, C;
};

struct Expected {
  const char* field;
  int64_t elements;  // 0: the format has no such array
  int64_t element_size;
};
using ExpectedArrays = std::array<Expected, kArrays>;

int64_t blocks_of(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

ExpectedArrays expected(int64_t format, const Values& values) {
  const auto& [E, R, C] = values;
  const int64_t count = E * R * C, nf4_blocks = count / tilemoe::kNf4Block;
  const auto arrays = [](int64_t codes, int64_t scales, int64_t scale_size, int64_t map = 0,
                         int64_t of_scales = 0, int64_t offset = 0) {
    return ExpectedArrays{{{kArrayNames[0], codes, 1},
                           {kArrayNames[1], scales, scale_size},
                           {kArrayNames[2], map, 4},
                           {kArrayNames[3], of_scales, 4},
                           {kArrayNames[4], offset, 4}}};
  };
  switch (format) {
    case TILEMOE_FORMAT_FP8:
      return arrays(count, E * blocks_of(R, tilemoe::kFp8Tile) * blocks_of(C, tilemoe::kFp8Tile),
                    4);
    case TILEMOE_FORMAT_MXFP4: return arrays(count / 2, count / tilemoe::kMxfp4Block, 1);
    case TILEMOE_FORMAT_NF4: return arrays(count / 2, nf4_blocks, 4);
    case TILEMOE_FORMAT_NF4_DOUBLE:
      return arrays(count / 2, nf4_blocks, 1, 256, blocks_of(nf4_blocks, tilemoe::kNf4NestedBlock),
                    1);
    case TILEMOE_FORMAT_NVFP4: return arrays(count / 2, count / tilemoe::kNvfp4Block, 1, 0, E);
    default: refuse("format must be a tilemoe_format, got " + std::to_string(format));
  }
}

// The view of one weight's arrays, which begin at `arrays`.
tilemoe_quantized view_of(const std::string& name, const MaybeTensor* arrays, int64_t format,
                          int64_t transposed, const Values& values) {
  const void* data[kArrays] = {};
  const ExpectedArrays all = expected(format, values);
  for (size_t i = 0; i < kArrays; ++i) {
    const auto& [field, elements, element_size] = all[i];
    const MaybeTensor& array = arrays[i];
    if (array.has_value() != (elements > 0))
      refuse(name + "." + field + " is " + (array ? "given" : "absent") + ", expected " +
             (elements > 0 ? "an array" : "none") + " for the format " +
             tilemoe_format_name(static_cast<tilemoe_format>(format)));
    if (!array) continue;
    if (array->numel() != elements || static_cast<int64_t>(array->element_size()) != element_size ||
        !array->is_contiguous())
      refuse(name + "." + field + " has shape " + describe_shape(*array) + ", expected " +
             std::to_string(elements) + " contiguous elements of " + std::to_string(element_size) +
             " bytes for the format " + tilemoe_format_name(static_cast<tilemoe_format>(format)));
    data[i] = array->data_ptr();
  }
  tilemoe_quantized view{};
  view.format = narrowed<tilemoe_format>("format", format);
  view.transposed = narrowed<int32_t>("transposed", transposed);
  view.codes = data[0], view.scales = data[1];
  view.scale_map = static_cast<const float*>(data[2]);
  view.scale_of_scales = static_cast<const float*>(data[3]);
  view.scale_offset = static_cast<const float*>(data[4]);
  return view;
}

Values values_of(const Tensor& weight, bool is_transposed) {
  const int64_t E = weight.size(0), rows = weight.size(1), columns = weight.size(2);
  return is_transposed ? Values{E, columns, rows} : Values{E, rows, columns};
}

}  // namespace

Quantized::Quantized(const std::vector<int64_t>& list) {
  if (list.empty()) return;
  const auto formats = unpack<Formats>("formats", list);
  formats_[kW1] = {formats.W1, formats.W1_transposed};
  formats_[kW1Up] = {formats.W1_up, formats.W1_up_transposed};
  formats_[kW2] = {formats.W2, formats.W2_transposed};
}

Quantized::Quantized(const Tensors& arrays, const std::vector<int64_t>& formats)
    : Quantized(formats) {
  arrays_ = arrays;
  const size_t count = exist() ? std::size(kQuantizedNames) : 0;
  if (arrays.size() != count) refuse_length("quantized", arrays.size(), count);
}

void Quantized::set_formats(tilemoe_experts& experts) const {
  experts.format_1 = narrowed<tilemoe_format>("formats.W1", formats_[kW1].format);
  experts.format_2 = narrowed<tilemoe_format>("formats.W2", formats_[kW2].format);
}

tilemoe_quantized_weights Quantized::view(const Tensors& weights) const {
  using Views = tilemoe_quantized_weights;
  tilemoe_quantized_weights made{};
  made.struct_size = sizeof made;
  if (!exist()) return made;
  for (const auto& [place, field, of_transposed] :
       {std::tuple(kW1, &Views::W1, &Views::W1_transposed),
        std::tuple(kW1Up, &Views::W1_up, &Views::W1_up_transposed),
        std::tuple(kW2, &Views::W2, &Views::W2_transposed)}) {
    const MaybeTensor* more =
        &arrays_[kQuantizedWeights * kArrays + place * kTransposedArrays];  // codes, scales
    if (!of(place)) {
      if (more[0]) refuse(std::string(kWeightNames[place]) + "_transposed requires the weight");
      continue;
    }
    if (!weights[place]) refuse(std::string(kWeightNames[place]) + " is required");
    check_dims(kWeightNames[place], *weights[place], 3, "three dimensions");
    const auto& [format, transposed] = formats_[place];
    made.*field = view_of(kWeightNames[place], &arrays_[place * kArrays], format, transposed,
                          values_of(*weights[place], transposed != 0));
    if (!more[0]) continue;
    const MaybeTensor all[kArrays] = {more[0], more[1]};
    made.*of_transposed = view_of(std::string(kWeightNames[place]) + "_transposed", all,
                                  TILEMOE_FORMAT_FP8, 1, values_of(*weights[place], true));
  }
  // The shapes of W1 and W2 are checked with the layer's sizes.
  if (of(kW1Up) && describe_shape(*weights[kW1Up]) != describe_shape(*weights[kW1]))
    refuse("W1_up has shape " + describe_shape(*weights[kW1Up]) + " and W1 " +
           describe_shape(*weights[kW1]) + ", expected the same");
  return made;
}

tilemoe_weights Quantized::with_strides(tilemoe_weights weights, const Tensors& shapes) const {
  for (const auto& [place, field] :
       {std::pair(kW1, &tilemoe_weights::W1), std::pair(kW1Up, &tilemoe_weights::W1_up),
        std::pair(kW2, &tilemoe_weights::W2)}) {
    if (!of(place) || !shapes[place]) continue;
    const Tensor& weight = *shapes[place];
    const int64_t rows = weight.size(1), columns = weight.size(2);
    const bool is_transposed = formats_[place].transposed != 0;
    tilemoe_tensor& view = weights.*field;
    view.ndim = 3;
    view.dtype = TILEMOE_BFLOAT16;  // of no importance: only the strides are read
    view.shape[0] = weight.size(0), view.shape[1] = rows, view.shape[2] = columns;
    view.stride[0] = rows * columns;
    view.stride[1] = is_transposed ? 1 : columns, view.stride[2] = is_transposed ? rows : 1;
  }
  return weights;
}

std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& values, int64_t block_rows,
                                        bool float_scales) {
  const Call call({{"values", values}});
  check_dims("values", values, 3, "(E, R, C)");
  const int64_t E = values.size(0), R = values.size(1), C = values.size(2);
  tilemoe_quantize_fp8_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.block_rows = narrowed<int32_t>("block_rows", block_rows);
  if (block_rows != 1 && block_rows != tilemoe::kFp8Tile)
    refuse("block_rows is " + std::to_string(block_rows) + ", expected 1 or 128");
  args.float_scales = float_scales;
  args.values = call.view("values", values);
  const Tensor codes = call.empty({E, R, C}, ScalarType::Byte);
  const Tensor scales =
      call.empty({E, blocks_of(R, block_rows), blocks_of(C, tilemoe::kFp8Tile)}, ScalarType::Float);
  args.codes = static_cast<uint8_t*>(codes.data_ptr());
  args.scales = static_cast<float*>(scales.data_ptr());
  args.stream = call.stream();
  if (codes.numel() > 0) check(tilemoe_quantize_fp8(&args));
  return {codes, scales};
}

void quantize_fp8_into(const Tensor& values, bool float_scales, const Tensor& codes,
                       const Tensor& scales, const MaybeTensor& transposed_codes,
                       const MaybeTensor& transposed_scales) {
  const Call call({{"values", values},
                   {"codes", codes},
                   {"block_scales", scales},
                   {"transposed_codes", transposed_codes},
                   {"transposed_scales", transposed_scales}});
  check_dims("values", values, 3, "(E, R, C)");
  const int64_t E = values.size(0), R = values.size(1), C = values.size(2);
  const auto check_out = [&](const char* name, const Tensor& out, const Values& of) {
    const ExpectedArrays arrays = expected(TILEMOE_FORMAT_FP8, of);
    const Expected& array = arrays[std::string(name).ends_with("scales") ? 1 : 0];
    if (out.numel() != array.elements ||
        static_cast<int64_t>(out.element_size()) != array.element_size || !out.is_contiguous())
      refuse(std::string(name) + " has shape " + describe_shape(out) + ", expected " +
             std::to_string(array.elements) + " contiguous elements of " +
             std::to_string(array.element_size) + " bytes");
  };
  check_out("codes", codes, {E, R, C}), check_out("block_scales", scales, {E, R, C});
  if (transposed_codes.has_value() != transposed_scales.has_value())
    refuse("transposed_codes and transposed_scales: one is absent, expected both or none");
  tilemoe_quantize_fp8_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.block_rows = static_cast<int32_t>(tilemoe::kFp8Tile);
  args.float_scales = float_scales;
  args.values = call.view("values", values);
  args.codes = static_cast<uint8_t*>(codes.data_ptr());
  args.scales = static_cast<float*>(scales.data_ptr());
  if (transposed_codes) {
    check_out("transposed_codes", *transposed_codes, {E, C, R});
    check_out("transposed_scales", *transposed_scales, {E, C, R});
    args.transposed_codes = static_cast<uint8_t*>(transposed_codes->data_ptr());
    args.transposed_scales = static_cast<float*>(transposed_scales->data_ptr());
  }
  args.stream = call.stream();
  if (codes.numel() > 0) check(tilemoe_quantize_fp8(&args));
}

Tensor dequantize(const Tensors& arrays, int64_t format, const std::vector<int64_t>& shape,
                  ScalarType dtype) {
  const Call call({{"arrays", kArrayNames, arrays}});
  if (shape.size() != 3) refuse_length("shape", shape.size(), 3);
  const Values values{shape[0], shape[1], shape[2]};
  const Tensor out = call.empty({values.E, values.R, values.C}, dtype);
  tilemoe_dequantize_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.weight = view_of("arrays", arrays.data(), format, 0, values);
  args.out = call.view("out", out);
  args.stream = call.stream();
  check(tilemoe_dequantize(&args));
  return out;
}

}  // namespace tilemoe_torch
