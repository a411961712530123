// The symbols of this library: the handlers, which Python registers with XLA, and the functions that
// Python calls while it traces (python/tilemoe/jax/_library.py).
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "view.h"

#ifdef TILEMOE_JAX_CUDA
#include "bindings/cuda/runtime.h"
#endif

namespace tilemoe_jax {
namespace {

using Names = std::vector<const char*>;

Names joined(Names names, const Names& more) {
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

}  // namespace

const Target& target_of(TargetName name) {
  static const Names codes = {"W1_codes",     "W1_scales", "W1_up_codes",
                              "W1_up_scales", "W2_codes",  "W2_scales"};
  static const Names transposed_codes = {"W1_transposed_codes",    "W1_transposed_scales",
                                         "W1_up_transposed_codes", "W1_up_transposed_scales",
                                         "W2_transposed_codes",    "W2_transposed_scales"};
  static const Target targets[kTargets] = {
      {"tilemoe.forward.v1",
       joined({"X", "ids", "scores", "W1", "W1_up", "W2", "b1", "b1_up", "b2", "addend", "A1", "B1",
               "A1_up", "B1_up", "A2", "B2"},
              codes),
       {"O", "routing", "H", "P1", "P2", "packed", "workspace", "H_codes", "H_scales"},
       forward},
      {"tilemoe.backward.v1",
       joined({"dO", "X", "H", "routing", "W1", "W1_up", "W2", "b1", "b1_up", "b2", "packed", "P1",
               "P2"},
              joined(joined(codes, transposed_codes), {"H_codes", "H_scales"})),
       {"dX", "ds", "dW1", "dW1_up", "dW2", "db1", "db1_up", "db2", "dA1", "dB1", "dA1_up",
        "dB1_up", "dA2", "dB2", "dH", "workspace", "dH_codes", "dH_scales"},
       backward},
      {"tilemoe.top_k.v1", {"logits", "selection_bias"}, {"scores", "ids", "counts"}, top_k},
      {"tilemoe.top_k_scores.v1", {"logits", "ids"}, {"scores"}, top_k_scores},
      {"tilemoe.top_k_backward.v1",
       {"dscores", "ids", "scores", "logits"},
       {"dlogits", "routing", "workspace"},
       top_k_backward},
      {"tilemoe.router_losses.v1",
       {"logits", "counts", "zeros"},
       {"losses", "dlogits", "workspace"},
       router_losses},
      {"tilemoe.quantize_fp8.v1",
       {"values"},
       {"codes", "scales", "transposed_codes", "transposed_scales"},
       quantize_fp8},
  };
  return targets[name];
}

namespace {

namespace ffi = xla::ffi;

#ifdef TILEMOE_JAX_CUDA
constexpr tilemoe_device kDevice = TILEMOE_CUDA;
#else
constexpr tilemoe_device kDevice = TILEMOE_CPU;
#endif

// ---- the handlers

ffi::ErrorCode code_of(tilemoe::Status status) {
  switch (status) {
    case tilemoe::Status::kInvalidArgument: return ffi::ErrorCode::kInvalidArgument;
    case tilemoe::Status::kUnsupported: return ffi::ErrorCode::kUnimplemented;
    case tilemoe::Status::kDeviceError: return ffi::ErrorCode::kUnavailable;
    case tilemoe::Status::kInternalError: break;
  }
  return ffi::ErrorCode::kInternal;
}

template <class Value>
Value value_of(const ffi::ErrorOr<Value>& found, const std::string& name) {
  if (!found.has_value()) refuse(name + ": " + found.error().message());
  return *found;
}

Array array_of(const char* name, const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {name, buffer.untyped_data(), buffer.element_type(), {dims.begin(), dims.end()}};
}

// Appends those of `names` whose bit is set, each from the next place of `given`.
template <class Given, class Read>
void append(std::vector<Array>& arrays, const std::vector<const char*>& names, int64_t bits,
            const Given& given, const Read& read) {
  size_t place = 0;
  for (size_t i = 0; i < names.size(); ++i)
    if ((bits >> i & 1) != 0) arrays.push_back(array_of(names[i], read(given, place++)));
  if (place != given.size())
    refuse("the call has " + std::to_string(given.size()) + " arrays, expected " +
           std::to_string(place));
}

// XLA:CPU flushes subnormal numbers to zero in its threads, and the library's threads inherit this
// from the one that starts them. The library computes with them, as in every other program.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&before_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t before_;
};

// No exception may reach XLA.
ffi::Error run(TargetName name, void* stream, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results, const ffi::Dictionary& attributes) noexcept try {
  const DefaultFloatingPoint floating_point;
  const Target& target = target_of(name);
  const Attributes by_name{
      [&](const char* of) { return value_of(attributes.get<int64_t>(of), of); },
      [&](const char* of) { return value_of(attributes.get<double>(of), of); }};
  std::vector<Array> arrays;
  append(arrays, target.operands, by_name.number("operands"), operands,
         [](const ffi::RemainingArgs& all, size_t place) {
           return value_of(all.get<ffi::AnyBuffer>(place), "operand");
         });
  append(arrays, target.results, by_name.number("results"), results,
         [](const ffi::RemainingRets& all, size_t place) {
           return *value_of(all.get<ffi::AnyBuffer>(place), "result");
         });
  Call call(kDevice, stream, by_name, std::move(arrays));
  target.run(call);
  return ffi::Error::Success();
} catch (const tilemoe::Error& error) {
  return {code_of(error.status()), error.what()};
} catch (const std::bad_alloc&) {
  return {ffi::ErrorCode::kResourceExhausted, "cannot allocate the workspace"};
} catch (const std::exception& error) {
  return {ffi::ErrorCode::kInternal, error.what()};
} catch (...) {
  return {ffi::ErrorCode::kInternal, "unknown exception"};
}

template <TargetName kName>
ffi::Error on_cpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  return run(kName, nullptr, operands, results, attributes);
}
template <TargetName kName>
ffi::Error on_cuda(void* stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  return run(kName, stream, operands, results, attributes);
}

}  // namespace

// ---- what Python calls

namespace {

thread_local std::string last_error, last_text;

template <class Body>
int guarded(const Body& body) noexcept {
  try {
    last_error.clear();
    body();
    return TILEMOE_SUCCESS;
  } catch (const tilemoe::Error& error) {
    last_error = error.what();
    return static_cast<int>(error.status());
  } catch (const std::exception& error) {
    last_error = error.what();
    return TILEMOE_INTERNAL_ERROR;
  }
}

// "kind 0\nclamp 7.0\n"
Attributes read_attributes(const char* text) {
  auto values = std::make_shared<std::map<std::string, double>>();
  std::istringstream lines(text);
  for (std::string name, value; lines >> name >> value;)
    (*values)[name] = std::strtod(value.c_str(), nullptr);
  const auto real = [values](const char* name) {
    const auto found = values->find(name);
    if (found == values->end()) refuse(std::string("attribute ") + name + " is required");
    return found->second;
  };
  return {[real](const char* name) { return static_cast<int64_t>(real(name)); }, real};
}

// "X float32 7 24\n", an operand a line.
void read_arrays(const char* text, Call& call) {
  static const std::map<std::string, ffi::DataType> types = {
      {"float32", ffi::DataType::F32},
      {"bfloat16", ffi::DataType::BF16},
      {"float16", ffi::DataType::F16},
      {"int32", ffi::DataType::S32},
      {"int64", ffi::DataType::S64},
      {"uint8", ffi::DataType::U8},
      {"float8_e4m3fn", ffi::DataType::F8E4M3FN}};
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, dtype;
    words >> name >> dtype;
    std::vector<int64_t> dims{std::istream_iterator<int64_t>(words), {}};
    const auto type = types.find(dtype);
    call.add(name, type == types.end() ? ffi::DataType::INVALID : type->second, std::move(dims));
  }
}

TargetName name_of(const char* target) {
  for (int name = 0; name < kTargets; ++name)
    if (std::strcmp(target_of(static_cast<TargetName>(name)).name, target) == 0)
      return static_cast<TargetName>(name);
  refuse(std::string("target ") + target + " is unknown");
}

Sizes plan(TargetName name, const Call& call, int32_t cuda_sms, bool checks) {
  switch (name) {
    case kForward: {
      const Sizes sizes = forward_sizes(call, cuda_sms);
      if (checks) check_forward(call, sizes);
      return sizes;
    }
    case kBackward: return backward_sizes(call, cuda_sms);
    case kTopKBackward: return router_sizes(call);
    case kRouterLosses: return losses_sizes(call);
    default: return {};
  }
}

}  // namespace
}  // namespace tilemoe_jax

#define HANDLER_CPU(symbol, name)                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                      \
      symbol, tilemoe_jax::on_cpu<tilemoe_jax::name>, \
      xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<xla::ffi::Dictionary>())
#define HANDLER_CUDA(symbol, name)                                               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, tilemoe_jax::on_cuda<tilemoe_jax::name>, \
                                xla::ffi::Ffi::Bind()                            \
                                    .Ctx<xla::ffi::PlatformStream<void*>>()      \
                                    .RemainingArgs()                             \
                                    .RemainingRets()                             \
                                    .Attrs<xla::ffi::Dictionary>(),              \
                                {xla::ffi::Traits::kCmdBufferCompatible})
#ifdef TILEMOE_JAX_CUDA
#define HANDLER HANDLER_CUDA
#else
#define HANDLER HANDLER_CPU
#endif

// The macro declares functions without default visibility, which exports.map selects from.
#pragma GCC visibility push(default)
HANDLER(tilemoe_jax_forward, kForward);
HANDLER(tilemoe_jax_backward, kBackward);
HANDLER(tilemoe_jax_top_k, kTopK);
HANDLER(tilemoe_jax_top_k_scores, kTopKScores);
HANDLER(tilemoe_jax_top_k_backward, kTopKBackward);
HANDLER(tilemoe_jax_router_losses, kRouterLosses);
HANDLER(tilemoe_jax_quantize_fp8, kQuantizeFp8);

extern "C" {

// The error of the calling thread's last call that failed.
const char* tilemoe_jax_last_error() {
  return tilemoe_jax::last_error.c_str();
}

int tilemoe_jax_version() {
  return tilemoe_version_number();
}

// The target's possible operands or results, separated by spaces; null: it is unknown.
const char* tilemoe_jax_arrays(const char* target, int results) {
  const int status = tilemoe_jax::guarded([&] {
    const tilemoe_jax::Target& found = tilemoe_jax::target_of(tilemoe_jax::name_of(target));
    std::string& text = tilemoe_jax::last_text;
    text.clear();
    for (const char* name : results ? found.results : found.operands)
      text.append(text.empty() ? "" : " ").append(name);
  });
  return status == TILEMOE_SUCCESS ? tilemoe_jax::last_text.c_str() : nullptr;
}

// Checks the operands of a call, and writes the sizes of its results: bytes of the routing, bytes of
// packed adapters, rows, bytes of the workspace (0 on the CPU). cuda_sms: of the GPU to run on.
int tilemoe_jax_plan(const char* target, const char* arrays, const char* attributes,
                     int32_t cuda_sms, int64_t* sizes) {
  return tilemoe_jax::guarded([&] {
    constexpr bool kCpu = tilemoe_jax::kDevice == TILEMOE_CPU;
    tilemoe_jax::Call call(tilemoe_jax::kDevice, nullptr, tilemoe_jax::read_attributes(attributes),
                           {});
    tilemoe_jax::read_arrays(arrays, call);
    const tilemoe_jax::Sizes found =
        tilemoe_jax::plan(tilemoe_jax::name_of(target), call, cuda_sms, kCpu);
    sizes[0] = found.routing, sizes[1] = found.packed, sizes[2] = found.capacity;
    sizes[3] = kCpu ? 0 : found.workspace;
  });
}

int tilemoe_jax_set_num_threads(int threads) {
  return tilemoe_jax::guarded([&] { tilemoe::check(tilemoe_set_num_threads(threads)); });
}

void tilemoe_jax_set_ctas_per_sm(int count) {
  tilemoe_jax::set_ctas_per_sm(count);
}

int tilemoe_jax_set_arch(const char* name) {
  return tilemoe_jax::guarded([&] { tilemoe::check(tilemoe_set_cuda_arch(name)); });
}

// One line about the device, or why it cannot be used.
const char* tilemoe_jax_description() {
  return tilemoe_device_description(tilemoe_jax::kDevice);
}

// SMs of a GPU, as CUDA counts it; 0: CUDA cannot read them. Makes no context.
int tilemoe_jax_sms(int device) {
#ifdef TILEMOE_JAX_CUDA
  return tilemoe_runtime_sms(device);
#else
  static_cast<void>(device);
  return 0;
#endif
}

}  // extern "C"
#pragma GCC visibility pop
