#include "call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace tilemoe_torch {
namespace {

constexpr int64_t kAlignment = 16;  // bytes, of pointers and strides

// For the whole process; each call passes it to the library.
std::atomic<int32_t> process_ctas_per_sm = 1;

// Python's name of a type, for types that users pass by mistake.
const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    default: return torch::headeronly::toString(dtype);
  }
}

std::string describe(const torch::stable::Device& device) {
  using torch::headeronly::DeviceType;
  const std::string index = device.has_index() ? ":" + std::to_string(device.index()) : "";
  switch (device.type()) {
    case DeviceType::CPU: return "cpu";
    case DeviceType::CUDA: return "cuda" + index;
    case DeviceType::Meta: return "meta";
    default: return "device type " + std::to_string(static_cast<int>(device.type())) + index;
  }
}

// Whether the argument with this name has whole numbers.
bool is_counted(const std::string& name) {
  static constexpr const char* kNames[] = {"ids",  "tokens", "experts", "counts", "expert_counts",
                                           "seed", "offset", "routing", "place"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

tilemoe_dtype dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return TILEMOE_FLOAT32;
    case ScalarType::BFloat16: return TILEMOE_BFLOAT16;
    case ScalarType::Half: return TILEMOE_FLOAT16;
    case ScalarType::Int: return TILEMOE_INT32;
    case ScalarType::Long: return TILEMOE_INT64;
    default:
      refuse(std::string(name) + " is " + name_of(tensor.scalar_type()) + " " +
             describe_shape(tensor) + ", expected " +
             (is_counted(name) ? "int32 or int64" : "float32, bfloat16 or float16"));
  }
}

bool has_dense_rows(const Tensor& matrix) {
  return (matrix.size(1) == 1 || matrix.stride(1) == 1) &&
         (matrix.size(0) == 1 || matrix.stride(0) >= matrix.size(1));
}

// `inner` is the contiguous dimension.
bool on_16_bytes(const Tensor& tensor, int64_t inner) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (i != inner && tensor.size(i) > 1 && tensor.stride(i) * element % kAlignment != 0)
      return false;
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment == 0;
}

using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

// torch::stable::empty finds the operator by its name and boxes its arguments in every call, which
// takes 3 us of the host. The C function takes 0.7, but on the CPU it does not fill the memory if
// torch.utils.deterministic requires it.
AOTITorchError try_empty(torch::stable::Device device, Shape shape, ScalarType dtype,
                         AtenTensorHandle* made) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(shape[i], 1))
    strides[i] = stride;
  return aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                  to<int32_t>(from(dtype)), to<int32_t>(from(device.type())),
                                  device.index(), made);
}

Tensor empty_on(torch::stable::Device device, Shape shape, ScalarType dtype) {
  try {
    if (device.is_cpu()) return torch::stable::empty(shape, dtype, std::nullopt, device);
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(try_empty(device, shape, dtype, &made));
    return Tensor(made);
  } catch (const std::exception&) {
    // Torch prints the reason to stderr: the stable ABI returns only that a call failed.
    std::string sizes;
    for (int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    throw OutOfMemory("(" + sizes + ")");
  }
}

// torch::stable::contiguous returns a contiguous tensor itself, at any address.
Tensor contiguous_copy(const Tensor& tensor) {
  Tensor copy = empty_on(tensor.device(), tensor.sizes(), tensor.scalar_type());
  return torch::stable::copy_(copy, tensor);
}

}  // namespace

int32_t Call::ctas_per_sm() {
  return process_ctas_per_sm.load(std::memory_order_relaxed);
}

void set_ctas_per_sm(int64_t count) {
  constexpr int64_t kMax = 16;
  if (count < 1 || count > kMax)
    refuse("ctas_per_sm must be an int in [1, " + std::to_string(kMax) + "], got " +
           std::to_string(count));
  process_ctas_per_sm.store(static_cast<int32_t>(count), std::memory_order_relaxed);
}

torch::stable::Device device_of(std::initializer_list<Argument> arguments) {
  const char* first = nullptr;
  std::optional<torch::stable::Device> device;  // of the first
  const auto look = [&](const char* name, const Tensor& tensor) {
    if (!first)
      first = name, device = tensor.device();
    else if (const torch::stable::Device other = tensor.device(); !(other == *device))
      refuse("expected all tensors on one device: " + std::string(name) + " is on " +
             describe(other) + ", " + first + " is on " + describe(*device));
  };
  for (const Argument& argument : arguments) {
    if (argument.tensor) look(argument.name, *argument.tensor);
    if (!argument.list) continue;
    for (size_t i = 0; i < argument.list->size(); ++i)
      if (const MaybeTensor& tensor = (*argument.list)[i]) look(argument.names[i], *tensor);
  }
  if (!first) refuse("the call has no tensor, expected at least one");
  return *device;
}

tilemoe_tensor Call::view(const char* name, const Tensor& tensor) const {
  if (tensor.dim() > TILEMOE_MAX_DIMS)
    refuse(std::string(name) + " has shape " + describe_shape(tensor) + ", expected at most " +
           std::to_string(TILEMOE_MAX_DIMS) + " dimensions");
  tilemoe_tensor view{};
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(name, tensor);
  view.ndim = static_cast<int32_t>(tensor.dim());
  for (int32_t i = 0; i < view.ndim; ++i)
    view.shape[i] = tensor.size(i), view.stride[i] = tensor.stride(i);
  return view;
}

tilemoe_tensor Call::view(const char* name, const MaybeTensor& tensor) const {
  return tensor ? view(name, *tensor) : tilemoe_tensor{};
}

Tensor Call::empty(std::initializer_list<int64_t> shape, ScalarType dtype) const {
  return empty_on(torch_device_, {shape.begin(), shape.size()}, dtype);
}

Tensor Call::zeros(std::initializer_list<int64_t> shape, ScalarType dtype) const {
  const Tensor tensor = empty(shape, dtype);
  zero(tensor);
  return tensor;
}

void zero(const Tensor& tensor) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(tensor.get()));
}

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Tensor Call::bytes(size_t count) const {
  return empty({static_cast<int64_t>(count)}, ScalarType::Byte);
}

Tensor Call::matrix_in(const Tensor& bytes, size_t offset, int64_t rows, int64_t columns,
                       ScalarType dtype) const {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const std::array sizes = {rows, columns}, strides = {columns, int64_t{1}};
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      static_cast<char*>(bytes.data_ptr()) + offset, 2, sizes.data(), strides.data(), 0,
      to<int32_t>(from(dtype)), to<int32_t>(from(torch_device_.type())), torch_device_.index(),
      &made));
  return Tensor(made);
}

void check(tilemoe_status status) {
  if (status == TILEMOE_SUCCESS) return;
  throw std::runtime_error(std::string(tilemoe_status_name(status)) + ": " + tilemoe_last_error());
}

void refuse(const std::string& sentence) {
  const char* status = tilemoe_status_name(TILEMOE_INVALID_ARGUMENT);
  throw std::runtime_error(std::string(status) + ": " + sentence);
}

void refuse_length(const char* name, size_t size, size_t expected) {
  refuse(std::string(name) + " has length " + std::to_string(size) + ", expected " +
         std::to_string(expected));
}

std::string describe_shape(const Tensor& tensor) {
  std::ostringstream text;
  text << "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ")";
  return text.str();
}

void check_dims(const char* name, const Tensor& tensor, int64_t dims, const char* expected) {
  if (tensor.dim() != dims)
    refuse(std::string(name) + " has shape " + describe_shape(tensor) + ", expected " + expected);
}

Tensor dense_rows(const Tensor& tensor) {
  return tensor.dim() != 2 || has_dense_rows(tensor) ? tensor : contiguous_copy(tensor);
}

Tensor dense_rows_on_16(const Tensor& tensor) {
  const bool fits = tensor.dim() != 2 || (has_dense_rows(tensor) && on_16_bytes(tensor, 1));
  return fits ? tensor : contiguous_copy(tensor);
}

Tensor weight_on_16(const Tensor& weight) {
  if (weight.dim() == 2) return dense_rows_on_16(weight);
  if (weight.dim() != 3) return weight;
  const int64_t inner = weight.stride(2) == 1 ? 2 : 1;
  if (weight.stride(inner) != 1 || on_16_bytes(weight, inner)) return weight;
  Tensor copy = empty_like_weight(weight);
  return torch::stable::copy_(copy, weight);
}

Tensor transposed(const Tensor& matrix) {
  const std::array sizes = {matrix.size(1), matrix.size(0)};
  const std::array strides = {matrix.stride(1), matrix.stride(0)};
  constexpr int64_t kSameOffset = 0;  // in addition to that of the matrix
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(matrix.get(), 2, sizes.data(),
                                                        strides.data(), kSameOffset, &made));
  return Tensor(made);
}

Tensor empty_like_weight(const Tensor& weight) {
  const auto empty = [&](Shape shape) {
    return empty_on(weight.device(), shape, weight.scalar_type());
  };
  if (weight.dim() != 3 || weight.stride(2) == 1 || weight.stride(1) != 1)
    return empty(weight.sizes());
  const std::array shape = {weight.size(0), weight.size(2), weight.size(1)};
  return torch::stable::transpose(empty({shape.data(), shape.size()}), 1, 2);
}

}  // namespace tilemoe_torch
