// One call of a target of XLA's FFI: its operands, results and attributes by name, as views that the
// C interface takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tilemoe/error.h"
#include "tilemoe/tilemoe.h"
#include "xla/ffi/api/ffi.h"

namespace tilemoe_jax {

using tilemoe::check;

[[noreturn]] inline void refuse(const std::string& sentence) {
  throw tilemoe::Error(tilemoe::Status::kInvalidArgument, sentence);
}

template <class Struct>
Struct sized() {
  Struct value{};
  value.struct_size = sizeof value;
  return value;
}

// A buffer of XLA: contiguous, the last dimension innermost.
struct Array {
  std::string name;
  void* data = nullptr;
  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;
  std::vector<int64_t> dims;
};

std::string describe(const std::vector<int64_t>& dims);  // "(2, 3)"

// The attributes of a call. Python passes each one, as an int64 or a float64.
struct Attributes {
  std::function<int64_t(const char*)> number;
  std::function<double(const char*)> real;
};

class Call;

// The arrays that a target may have, in the order of XLA; the attributes `operands` and `results` are bits of those
// that a call has.
struct Target {
  const char* name;
  std::vector<const char*> operands, results;
  void (*run)(Call&);
};

// All targets of this library, in a fixed order.
enum TargetName {
  kForward,
  kBackward,
  kTopK,
  kTopKScores,
  kTopKBackward,
  kRouterLosses,
  kQuantizeFp8,
  kTargets
};
const Target& target_of(TargetName name);

class Call {
 public:
  Call(tilemoe_device its_device, void* its_stream, Attributes attributes,
       std::vector<Array> arrays)
      : device(its_device),
        stream(its_stream),
        attributes_(std::move(attributes)),
        arrays_(std::move(arrays)) {}

  const tilemoe_device device;
  void* const stream;

  int64_t number(const char* name) const { return attributes_.number(name); }
  float real(const char* name) const { return static_cast<float>(attributes_.real(name)); }
  template <class Enum>
  Enum kind(const char* name) const {
    return static_cast<Enum>(number(name));
  }

  const Array* find(const std::string& name) const;  // null: absent
  bool has(const std::string& name) const { return find(name) != nullptr; }
  tilemoe_tensor tensor(const std::string& name) const;  // absent if the call has none
  // The same of a weight, or of its gradient. With the attribute `transposed` the array is
  // (E, columns, rows), and the view (E, rows, columns).
  tilemoe_tensor weight(const std::string& name) const;
  // An operand or result of bytes: routing, packed adapters, the workspace.
  void* memory(const std::string& name) const;
  size_t bytes(const std::string& name) const;  // 0 if absent

  // An array without data, for a call that is only checked: its address belongs to no memory, and
  // is far from that of any other.
  void add(const std::string& name, xla::ffi::DataType dtype, std::vector<int64_t> dims);

 private:
  const Attributes attributes_;
  std::vector<Array> arrays_;
};

// The workspace of a call: on CUDA its result `workspace`, which XLA plans with all other memory and
// whose size the library checks; on the CPU memory of the call.
class Workspace {
 public:
  Workspace(const Call& call, size_t needed);

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> own_;
  void* data_;
  size_t bytes_;
};

// Bytes of memory that the results of a call have, besides arrays of the layer's own sizes.
struct Sizes {
  int64_t routing = 0, packed = 0, capacity = 0, workspace = 0;
};

// Of a call that has operands alone. cuda_sms: SMs of the GPU that the call may run on; 0: the
// current device.
Sizes forward_sizes(const Call& call, int32_t cuda_sms);
Sizes backward_sizes(const Call& call, int32_t cuda_sms);
Sizes router_sizes(const Call& call);  // kTopKBackward
Sizes losses_sizes(const Call& call);  // kRouterLosses
// Throws the error of a forward with these operands. Nothing is computed, no data is read.
void check_forward(Call call, const Sizes& sizes);

void forward(Call& call);
void backward(Call& call);
void top_k(Call& call);
void top_k_scores(Call& call);
void top_k_backward(Call& call);
void router_losses(Call& call);
void quantize_fp8(Call& call);

// Whether W1 or W2 is FP8 codes. Sets the recipe, the formats of such weights and that of H.
bool has_codes(const Call& call);
void set_formats(const Call& call, tilemoe_experts& experts);
// H_codes and H_scales of a call with experts.format_H FP8. The codes are bytes, which XLA copies as
// they are.
std::vector<int64_t> dims_of_H_scales(const tilemoe_experts& experts, int64_t capacity);
void save_codes_of_H(const Call& call, const tilemoe_experts& experts, int64_t capacity,
                     tilemoe_saved& saved);
// The operands <weight>_codes and _scales, and <weight>_transposed_codes and _scales.
tilemoe_quantized_weights quantized_of(const Call& call, const tilemoe_experts& experts);

// For the whole process; forward and backward read it when they run.
void set_ctas_per_sm(int32_t count);

}  // namespace tilemoe_jax
