#include "view.h"

#include <algorithm>
#include <new>
#include <utility>

namespace tilemoe_jax {
namespace {

using xla::ffi::DataType;

constexpr std::align_val_t kAlignment{64};

tilemoe_dtype dtype_of(const Array& array) {
  switch (array.dtype) {
    case DataType::F32: return TILEMOE_FLOAT32;
    case DataType::BF16: return TILEMOE_BFLOAT16;
    case DataType::F16: return TILEMOE_FLOAT16;
    case DataType::S32: return TILEMOE_INT32;
    case DataType::S64: return TILEMOE_INT64;
    default:
      refuse(array.name + " has XLA's type " + std::to_string(static_cast<int>(array.dtype)) + " " +
             describe(array.dims) + ", expected float32, bfloat16, float16, int32 or int64");
  }
}

tilemoe_tensor view_of(const Array& array) {
  if (array.dims.empty() || array.dims.size() > TILEMOE_MAX_DIMS)
    refuse(array.name + " has shape " + describe(array.dims) + ", expected 1 to 3 dimensions");
  tilemoe_tensor view{};
  view.data = array.data;
  view.dtype = dtype_of(array);
  view.ndim = static_cast<int32_t>(array.dims.size());
  int64_t stride = 1;
  for (size_t i = array.dims.size(); i-- > 0; stride *= std::max<int64_t>(array.dims[i], 1))
    view.shape[i] = array.dims[i], view.stride[i] = stride;
  return view;
}

}  // namespace

std::string describe(const std::vector<int64_t>& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

const Array* Call::find(const std::string& name) const {
  const auto found = std::find_if(arrays_.begin(), arrays_.end(),
                                  [&](const Array& array) { return array.name == name; });
  return found == arrays_.end() ? nullptr : &*found;
}

tilemoe_tensor Call::tensor(const std::string& name) const {
  const Array* const array = find(name);
  return array ? view_of(*array) : tilemoe_tensor{};
}

tilemoe_tensor Call::weight(const std::string& name) const {
  tilemoe_tensor view = tensor(name);
  if (view.ndim == 3 && number("transposed") != 0) {
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
  }
  return view;
}

void* Call::memory(const std::string& name) const {
  const Array* const array = find(name);
  return array ? array->data : nullptr;
}

size_t Call::bytes(const std::string& name) const {
  const Array* const array = find(name);
  if (array == nullptr) return 0;
  if (array->dtype != DataType::U8 || array->dims.size() != 1)
    refuse(name + " has shape " + describe(array->dims) + ", expected bytes");
  return static_cast<size_t>(array->dims[0]);
}

void Call::add(const std::string& name, DataType dtype, std::vector<int64_t> dims) {
  constexpr int kFar = 56;  // more bits than any memory has addresses
  const uintptr_t address = (arrays_.size() + 1) << kFar;
  arrays_.push_back({name, reinterpret_cast<void*>(address), dtype, std::move(dims)});
}

Workspace::Workspace(const Call& call, size_t needed)
    : data_(call.memory("workspace")), bytes_(call.bytes("workspace")) {
  if (call.device != TILEMOE_CPU) return;
  if (needed > 0) own_.reset(::operator new(needed, kAlignment));
  data_ = own_.get(), bytes_ = needed;
}

void Workspace::Free::operator()(void* memory) const {
  ::operator delete(memory, kAlignment);
}

}  // namespace tilemoe_jax
