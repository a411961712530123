#include "core/check.h"

#include <algorithm>
#include <cstring>

namespace tilemoe {

void throw_error(Status status, const std::string& message, const char* file, int line,
                 const char* expression) {
  const char* name = std::strrchr(file, '/');
  Text text;
  text << message << " [" << (name ? name + 1 : file) << ":" << line << ": " << expression << "]";
  throw Error(status, text.str());
}

namespace {

uint64_t checked_size(const char* name, const void* given, size_t min_bytes) {
  TILEMOE_CHECK(given != nullptr, name << " is null");
  uint64_t size = 0;
  std::memcpy(&size, given, sizeof size);
  TILEMOE_CHECK(size >= min_bytes && size <= kMaxStructBytes && size % 4 == 0,
                name << ".struct_size is " << size << ", expected at least " << min_bytes
                     << ": set it to sizeof the struct");
  return size;
}

}  // namespace

void copy_struct(const char* name, const void* given, size_t min_bytes, void* copy, size_t known) {
  const uint64_t size = checked_size(name, given, min_bytes);
  const auto* const bytes = static_cast<const unsigned char*>(given);
  for (size_t i = known; i < size; ++i)
    TILEMOE_CHECK(bytes[i] == 0, name << ".struct_size is " << size << " and byte " << i
                                      << " is not zero, but this version of TileMoE has only "
                                      << known << " bytes: zero the rest or use a newer version");
  std::memcpy(copy, given, std::min<size_t>(known, size));
}

void fill_struct(const char* name, void* to, size_t min_bytes, const void* value, size_t known) {
  const uint64_t size = checked_size(name, to, min_bytes);
  const size_t filled = std::min<size_t>(known, size);
  auto* const bytes = static_cast<unsigned char*>(to);
  std::memcpy(bytes + sizeof size, static_cast<const unsigned char*>(value) + sizeof size,
              filled - sizeof size);
  std::memset(bytes + filled, 0, size - filled);
}

std::string describe_shape(const tilemoe_tensor& tensor) {
  Text text;
  text << "(";
  for (int i = 0; i < tensor.ndim && i < TILEMOE_MAX_DIMS; ++i)
    text << (i ? ", " : "") << tensor.shape[i];
  text << ")";
  return text.str();
}

std::string describe(const tilemoe_tensor& tensor) {
  if (!present(tensor)) return "absent";
  return std::string(tilemoe_dtype_name(tensor.dtype)) + " " + describe_shape(tensor);
}

int64_t checked_product(int64_t a, int64_t b, const char* what) {
  TILEMOE_CHECK(a >= 0 && b >= 0, what << " is negative: " << a << " * " << b);
  TILEMOE_CHECK(a == 0 || b <= limits::kMaxTensorBytes / a,
                what << " overflows: " << a << " * " << b);
  return a * b;
}

int64_t checked_sum(int64_t a, int64_t b, const char* what) {
  TILEMOE_CHECK(a >= 0 && b >= 0, what << " is negative: " << a << " + " << b);
  TILEMOE_CHECK(b <= limits::kMaxTensorBytes - a, what << " overflows: " << a << " + " << b);
  return a + b;
}

size_t round_up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

namespace {

std::string join_shape(const Shape& shape) {
  Text text;
  text << "(";
  for (int i = 0; i < shape.ndim; ++i) text << (i ? ", " : "") << shape.size[i];
  text << ")";
  return text.str();
}

std::string join_dtypes(const DTypes& dtypes) {
  Text text;
  for (int i = 0; i < dtypes.count; ++i)
    text << (i ? " or " : "") << tilemoe_dtype_name(dtypes.dtype[i]);
  return text.str();
}

// Dimensions of size 1 may have any stride, here and below: nothing steps along them.
void check_contiguous(const char* name, const tilemoe_tensor& tensor) {
  int64_t step = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    TILEMOE_CHECK(tensor.shape[i] == 1 || tensor.stride[i] == step,
                  name << " " << describe(tensor) << " must be contiguous: stride[" << i << "] is "
                       << tensor.stride[i] << ", expected " << step);
    step *= tensor.shape[i];
  }
}

// Elements from the first one to the last that the dimensions with smaller strides than `dim`
// reach.
int64_t span_below(const char* name, const tilemoe_tensor& tensor, int dim) {
  int64_t span = 1;
  for (int i = 0; i < tensor.ndim; ++i) {
    const bool below = tensor.stride[i] < tensor.stride[dim] ||
                       (tensor.stride[i] == tensor.stride[dim] && i > dim);
    if (i != dim && below && tensor.shape[i] > 1 && tensor.stride[i] > 0)
      span = checked_sum(span, checked_product(tensor.stride[i], tensor.shape[i] - 1, name), name);
  }
  return span;
}

// No element is reached twice where each dimension steps past all that the smaller ones span.
void check_overlap(const char* name, const tilemoe_tensor& tensor) {
  int64_t last_element = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 1) continue;
    const int64_t span = tensor.stride[i] > 0 ? span_below(name, tensor, i) : 1;
    TILEMOE_CHECK(tensor.stride[i] >= span,
                  name << " " << describe(tensor) << " overlaps itself: stride[" << i << "] is "
                       << tensor.stride[i] << ", expected at least " << span);
    last_element = checked_sum(last_element,
                               checked_product(tensor.stride[i], tensor.shape[i] - 1, name), name);
  }
  checked_product(last_element + 1, static_cast<int64_t>(tilemoe_dtype_size(tensor.dtype)), name);
}

void check_strides(const char* name, const tilemoe_tensor& tensor, const TensorRule& rule) {
  if (rule.strides == Strides::kContiguous) return check_contiguous(name, tensor);
  if (rule.strides == Strides::kAny) return check_overlap(name, tensor);
  const bool either = rule.strides == Strides::kMatrixEitherMajor;
  const int last = tensor.ndim - 1;
  const int inner = either && tensor.stride[last] != 1 ? last - 1 : last;
  TILEMOE_CHECK(tensor.shape[inner] == 1 || tensor.stride[inner] == 1,
                name << " " << describe(tensor) << ": stride[" << last << "] is "
                     << tensor.stride[last] << ", expected 1"
                     << (either ? " in that dimension or the one before" : ""));
  const auto multiple = static_cast<int64_t>(limits::kAlignment / tilemoe_dtype_size(tensor.dtype));
  for (int i = 0; i < tensor.ndim && rule.aligned; ++i)
    TILEMOE_CHECK(i == inner || tensor.shape[i] == 1 || tensor.stride[i] % multiple == 0,
                  name << " " << describe(tensor) << ": stride[" << i << "] is " << tensor.stride[i]
                       << " elements, which is not a multiple of " << limits::kAlignment
                       << " bytes");
  check_overlap(name, tensor);
}

}  // namespace

void check_tensor(const char* name, const tilemoe_tensor& tensor, const TensorRule& rule) {
  TILEMOE_CHECK(present(tensor), name << " is absent, expected shape " << join_shape(rule.shape));
  bool dtype_fits = false;
  for (int i = 0; i < rule.dtypes.count; ++i)
    dtype_fits = dtype_fits || tensor.dtype == rule.dtypes.dtype[i];
  TILEMOE_CHECK(dtype_fits,
                name << " is " << describe(tensor) << ", expected " << join_dtypes(rule.dtypes));
  bool shape_fits = tensor.ndim == rule.shape.ndim;
  int64_t elements = 1;
  for (int i = 0; i < rule.shape.ndim; ++i) {
    if (shape_fits && tensor.shape[i] != rule.shape.size[i]) shape_fits = false;
    elements = checked_product(elements, rule.shape.size[i], name);
  }
  TILEMOE_CHECK(shape_fits, name << " has shape " << describe_shape(tensor) << ", expected "
                                 << join_shape(rule.shape));
  checked_product(elements, static_cast<int64_t>(tilemoe_dtype_size(tensor.dtype)), name);
  if (elements == 0) return;
  TILEMOE_CHECK(tensor.data != nullptr,
                name << " " << describe(tensor) << " has a null data pointer");
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  const size_t alignment = rule.aligned ? limits::kAlignment : tilemoe_dtype_size(tensor.dtype);
  TILEMOE_CHECK(address % alignment == 0, name << " " << describe(tensor) << ": data pointer "
                                               << tensor.data << " is not aligned to " << alignment
                                               << " bytes");
  check_strides(name, tensor, rule);
}

void check_optional(const char* name, const tilemoe_tensor& tensor, const TensorRule& rule) {
  if (present(tensor)) check_tensor(name, tensor, rule);
}

void check_absent(const char* name, const tilemoe_tensor& tensor, const char* why) {
  TILEMOE_CHECK(!present(tensor), name << " is " << describe(tensor) << ", expected none: " << why);
}

void check_workspace(const void* workspace, size_t bytes, size_t needed) {
  TILEMOE_CHECK(bytes >= needed,
                "workspace has " << bytes << " bytes, expected at least " << needed);
  TILEMOE_CHECK(needed == 0 || workspace != nullptr,
                "workspace is null, expected " << needed << " bytes");
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(workspace) % limits::kAlignment == 0,
                "workspace " << workspace << " is not aligned to 16 bytes");
}

void check_flag(const char* name, int32_t flag) {
  TILEMOE_CHECK(flag == 0 || flag == 1, name << " is " << flag << ", expected 0 or 1");
}

void check_reserved(const char* name, int32_t reserved) {
  TILEMOE_CHECK(reserved == 0, name << ".reserved is " << reserved << ", expected 0");
}

}  // namespace tilemoe
