// Argument checks shared by every entry and every backend. A failed check throws Error, whose text
// ends with the file, the line and the expression.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "tilemoe/error.h"

namespace tilemoe {

[[noreturn]] void throw_error(Status status, const std::string& message, const char* file, int line,
                              const char* expression);

// TILEMOE_CHECK(T >= 0, "T is " << T << ", expected at least 0");
#define TILEMOE_CHECK_AS(status, condition, message)                                            \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::ostringstream tilemoe_check_text;                                                    \
      tilemoe_check_text << message;                                                            \
      ::tilemoe::throw_error(status, tilemoe_check_text.str(), __FILE__, __LINE__, #condition); \
    }                                                                                           \
  } while (false)
#define TILEMOE_CHECK(condition, message) \
  TILEMOE_CHECK_AS(::tilemoe::Status::kInvalidArgument, condition, message)
#define TILEMOE_CHECK_SUPPORTED(condition, message) \
  TILEMOE_CHECK_AS(::tilemoe::Status::kUnsupported, condition, message)
// A defect of ours, never the caller's.
#define TILEMOE_ASSERT(condition, message) \
  TILEMOE_CHECK_AS(::tilemoe::Status::kInternalError, condition, message)

template <class Args>
void check_struct(const Args* args, const char* name) {
  TILEMOE_CHECK(args != nullptr, name << " is null");
  TILEMOE_CHECK(
      args->struct_size == sizeof(Args),
      name << ".struct_size is " << args->struct_size << ", expected " << sizeof(Args)
           << ": it was not set, or the program was built against another version's header");
}

inline bool present(const tilemoe_tensor& tensor) {
  return tensor.ndim != 0 || tensor.data != nullptr;
}
inline bool is_16bit(tilemoe_dtype dtype) {
  return dtype == TILEMOE_BFLOAT16 || dtype == TILEMOE_FLOAT16;
}
inline bool is_float(tilemoe_dtype dtype) {
  return is_16bit(dtype) || dtype == TILEMOE_FLOAT32;
}

// "float32 (4096, 512)"
std::string describe(const tilemoe_tensor& tensor);
std::string describe_shape(const tilemoe_tensor& tensor);

// a * b and a + b, or an error that names `what` where they pass 2^62 or a term is negative.
int64_t checked_product(int64_t a, int64_t b, const char* what);
int64_t checked_sum(int64_t a, int64_t b, const char* what);
size_t round_up(size_t bytes, size_t to);

// How a tensor's strides may lie.
enum class Strides {
  kContiguous,  // dense, last dimension fastest
  kRows,        // last dimension contiguous, the others any multiple of 16 bytes, not overlapping
  kMatrixEitherMajor  // of the last two dimensions one is contiguous, the other a multiple of 16
                      // bytes
};

// The dimensions and the dtypes that a rule asks for: values, since a rule may outlive the braces
// that it was written with.
struct Shape {
  int ndim = 0;
  int64_t size[TILEMOE_MAX_DIMS] = {};
  Shape(std::initializer_list<int64_t> sizes) {
    for (int64_t each : sizes) size[ndim++] = each;
  }
};
struct DTypes {
  int count = 0;
  tilemoe_dtype dtype[3] = {};
  constexpr DTypes(std::initializer_list<tilemoe_dtype> dtypes) {
    for (tilemoe_dtype each : dtypes) dtype[count++] = each;
  }
};

struct TensorRule {
  Shape shape;
  DTypes dtypes;
  Strides strides = Strides::kContiguous;
  bool aligned = true;  // data and strides on 16 bytes
};

// Checks an existing tensor: dtype, shape, strides, alignment, extent, and that data is not null
// unless it has no elements. `name` is the argument's name in the public header.
void check_tensor(const char* name, const tilemoe_tensor& tensor, const TensorRule& rule);
// The same, or absent.
void check_optional(const char* name, const tilemoe_tensor& tensor, const TensorRule& rule);
void check_absent(const char* name, const tilemoe_tensor& tensor, const char* why);

void check_workspace(const void* workspace, size_t bytes, size_t needed);

}  // namespace tilemoe
