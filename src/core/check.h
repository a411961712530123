// Argument checks that every entry and every backend share: errors, structs of any version,
// tensors, and the limits of the library. A failed check throws Error, whose text ends with the
// file, the line and the expression.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "core/text.h"
#include "tilemoe/error.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

[[noreturn]] void throw_error(Status status, const std::string& message, const char* file, int line,
                              const char* expression);

// TILEMOE_CHECK(T >= 0, "T is " << T << ", expected at least 0");
#define TILEMOE_CHECK_AS(status, condition, message)                                            \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      ::tilemoe::Text tilemoe_check_text;                                                       \
      tilemoe_check_text << message;                                                            \
      ::tilemoe::throw_error(status, tilemoe_check_text.str(), __FILE__, __LINE__, #condition); \
    }                                                                                           \
  } while (false)
#define TILEMOE_CHECK(condition, message) \
  TILEMOE_CHECK_AS(::tilemoe::Status::kInvalidArgument, condition, message)
#define TILEMOE_CHECK_SUPPORTED(condition, message) \
  TILEMOE_CHECK_AS(::tilemoe::Status::kUnsupported, condition, message)
// A defect of the library, never of the caller.
#define TILEMOE_ASSERT(condition, message) \
  TILEMOE_CHECK_AS(::tilemoe::Status::kInternalError, condition, message)

// ---- structs that grow at their end (tilemoe.h has the rules)

// The minimum size of a struct: its first layout without the optional fields at its end.
template <class Struct>
inline constexpr size_t kMinBytes = sizeof(Struct);
template <>
inline constexpr size_t kMinBytes<tilemoe_routing_spec> = offsetof(tilemoe_routing_spec, m);
template <>
inline constexpr size_t kMinBytes<tilemoe_routing> =
    offsetof(tilemoe_routing, spec) + kMinBytes<tilemoe_routing_spec>;
template <>
inline constexpr size_t kMinBytes<tilemoe_top_k_args> = offsetof(tilemoe_top_k_args, stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_top_k_scores_args> = offsetof(tilemoe_top_k_scores_args,
                                                                        stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_router_logits_args> = offsetof(tilemoe_router_logits_args,
                                                                         stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_route_top_k_args> = offsetof(tilemoe_route_top_k_args,
                                                                       stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_route_tokens_args> = offsetof(tilemoe_route_tokens_args,
                                                                        stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_route_general_args> = offsetof(tilemoe_route_general_args,
                                                                         stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_route_rounded_args> = offsetof(tilemoe_route_rounded_args,
                                                                         stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_route_grouped_args> = offsetof(tilemoe_route_grouped_args,
                                                                         stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_router_backward_args> =
    offsetof(tilemoe_router_backward_args, stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_router_losses_args> = offsetof(tilemoe_router_losses_args,
                                                                         stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_sum_rows_args> = offsetof(tilemoe_sum_rows_args, stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_experts> = offsetof(tilemoe_experts, clamp);
template <>
inline constexpr size_t kMinBytes<tilemoe_weights> = offsetof(tilemoe_weights, b1);
template <>
inline constexpr size_t kMinBytes<tilemoe_lora> = offsetof(tilemoe_lora, scale_1);
template <>
inline constexpr size_t kMinBytes<tilemoe_packed_lora> = offsetof(tilemoe_packed_lora, scale_1);
template <>
inline constexpr size_t kMinBytes<tilemoe_pack_lora_args> = offsetof(tilemoe_pack_lora_args,
                                                                     stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_dequantize_args> = offsetof(tilemoe_dequantize_args,
                                                                      stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_quantize_fp8_args> = offsetof(tilemoe_quantize_fp8_args,
                                                                        stream);
template <>
inline constexpr size_t kMinBytes<tilemoe_quantized_weights> = offsetof(tilemoe_quantized_weights,
                                                                        W1_transposed);
template <>
inline constexpr size_t kMinBytes<tilemoe_saved_size> = offsetof(tilemoe_saved_size, total);
template <>
inline constexpr size_t kMinBytes<tilemoe_saved> = offsetof(tilemoe_saved, parts_tokens);
template <>
inline constexpr size_t kMinBytes<tilemoe_workspace_query> = offsetof(tilemoe_workspace_query,
                                                                      gradients);
template <>
inline constexpr size_t kMinBytes<tilemoe_forward_args> = offsetof(tilemoe_forward_args,
                                                                   block_turns);
template <>
inline constexpr size_t kMinBytes<tilemoe_backward_args> = offsetof(tilemoe_backward_args,
                                                                    block_turns);
template <>
inline constexpr size_t kMinBytes<tilemoe_gathered_mm_args> = offsetof(tilemoe_gathered_mm_args,
                                                                       block_turns);
template <>
inline constexpr size_t kMinBytes<tilemoe_gathered_mm_backward_args> =
    offsetof(tilemoe_gathered_mm_backward_args, block_turns);
template <>
inline constexpr size_t kMinBytes<tilemoe_combine_mm_args> = offsetof(tilemoe_combine_mm_args,
                                                                      block_turns);
template <>
inline constexpr size_t kMinBytes<tilemoe_combine_mm_backward_args> =
    offsetof(tilemoe_combine_mm_backward_args, block_turns);
template <>
inline constexpr size_t kMinBytes<tilemoe_mm_workspace_query> = offsetof(tilemoe_mm_workspace_query,
                                                                         gradients);

// A larger size means that the caller never set it.
inline constexpr size_t kMaxStructBytes = 1 << 12;

// `given` starts with its struct_size. Copies the bytes that both have to `copy` of `known` bytes;
// throws if `given` is null or too small, or is not zero in the bytes that `copy` lacks.
void copy_struct(const char* name, const void* given, size_t min_bytes, void* copy, size_t known);
// Copies `value` of `known` bytes to `to`, as far as the struct_size of `to` reaches, keeps that
// size and zeroes the rest.
void fill_struct(const char* name, void* to, size_t min_bytes, const void* value, size_t known);

// A caller's struct in the layout of this version: fields that the caller's struct lacks are zero.
template <class Struct>
Struct read_struct(const char* name, const Struct* given, size_t min_bytes = kMinBytes<Struct>) {
  static_assert(std::is_trivially_copyable_v<Struct> && offsetof(Struct, struct_size) == 0);
  Struct copy{};
  copy_struct(name, given, min_bytes, &copy, sizeof copy);
  copy.struct_size = sizeof copy;
  return copy;
}
// Fills a caller's struct, as far as it goes.
template <class Struct>
void write_struct(const char* name, Struct* to, const Struct& value,
                  size_t min_bytes = kMinBytes<Struct>) {
  fill_struct(name, to, min_bytes, &value, sizeof value);
}

// ---- tensors

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

// a * b and a + b, or an error that names `what` if the result exceeds 2^62 or a term is negative.
int64_t checked_product(int64_t a, int64_t b, const char* what);
int64_t checked_sum(int64_t a, int64_t b, const char* what);
size_t round_up(size_t bytes, size_t to);
// Blocks of `size`, the last one as short as it must be.
constexpr int64_t blocks_of(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

// The strides that a tensor may have.
enum class Strides {
  kContiguous,  // dense, last dimension fastest
  kRows,        // last dimension contiguous, the others any multiple of 16 bytes, not overlapping
  kAny,         // any that do not overlap
  kMatrixEitherMajor  // of the last two dimensions one is contiguous, the other a multiple of 16
                      // bytes
};

// The dimensions and the dtypes that a rule requires: values, since a rule may outlive the braces
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
// 0 or 1.
void check_flag(const char* name, int32_t flag);
void check_reserved(const char* name, int32_t reserved);

}  // namespace tilemoe

namespace tilemoe::limits {

// The limits of the library: the checks report an error past them, and `tilemoe info` prints them.

inline constexpr int64_t kWidthMultiple = 8;  // d, n: a 16-bit row is a multiple of 16 bytes
inline constexpr int64_t kMaxWidth = int64_t{1} << 24;  // d, n: no grid is too tall
// T, pairs, capacity: int32 on the device. A tensor map holds fewer (cuda/core/tensor_map.h).
inline constexpr int64_t kMaxRows = INT32_MAX;
inline constexpr int64_t kMaxRowsCuda = (int64_t{1} << 30) - 1;
// Strides of X, dO, weights and their gradients on CUDA: rows in 32 bits of bytes, since an address
// is one multiplication; experts as TMA takes them.
inline constexpr int64_t kMaxRowStrideBytesCuda = UINT32_MAX;
inline constexpr int64_t kMaxExpertStrideBytesCuda = (int64_t{1} << 40) - 1;
inline constexpr int64_t kMaxMultiple = INT32_MAX;            // m
inline constexpr int64_t kMaxExperts = INT32_MAX - 1;         // E: E + 1 offsets
inline constexpr size_t kAlignment = 16;                      // pointers and strides, in bytes
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 62;  // of one tensor
inline constexpr int kMaxThreads = 4096;
inline constexpr int kMaxBlockTurns = 16;

inline int64_t max_rows(tilemoe_device device) {
  return device == TILEMOE_CUDA ? kMaxRowsCuda : kMaxRows;
}

}  // namespace tilemoe::limits
