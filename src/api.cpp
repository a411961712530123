// The C interface: every function returns exceptions as a status and a text.

#include <exception>
#include <new>
#include <string>

#include "core/activation_kinds.h"
#include "core/backend.h"
#include "core/check.h"
#include "cpu/cpu_backend.h"
#include "cpu/thread_pool.h"
#include "cuda/cuda_backend.h"
#include "layer/layer.h"
#include "layer/lora.h"
#include "layer/quantized.h"
#include "routing/rules.h"
#include "routing/spec.h"
#include "tilemoe/tilemoe.h"

namespace {

thread_local std::string last_error;
thread_local std::string last_description;

tilemoe_status fail(tilemoe_status status, const char* function, const char* what) noexcept {
  try {
    last_error = std::string(function) + ": " + what;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

template <class Body>
tilemoe_status guarded(const char* function, Body&& body) noexcept {
  try {
    last_error.clear();
    body();
    return TILEMOE_SUCCESS;
  } catch (const tilemoe::Error& error) {
    return fail(static_cast<tilemoe_status>(error.status()), function, error.what());
  } catch (const std::exception& error) {
    return fail(TILEMOE_INTERNAL_ERROR, function, error.what());
  } catch (...) {
    return fail(TILEMOE_INTERNAL_ERROR, function, "unknown exception");
  }
}

template <class Pointer>
void check_out(Pointer* pointer, const char* name) {
  TILEMOE_CHECK(pointer != nullptr, name << " is null");
}

#define TILEMOE_STRINGIFY_(x) #x
#define TILEMOE_STRINGIFY(x) TILEMOE_STRINGIFY_(x)

}  // namespace

extern "C" {

const char* tilemoe_version(void) {
  return TILEMOE_STRINGIFY(TILEMOE_VERSION_MAJOR) "." TILEMOE_STRINGIFY(
      TILEMOE_VERSION_MINOR) "." TILEMOE_STRINGIFY(TILEMOE_VERSION_PATCH);
}

int tilemoe_version_number(void) {
  return TILEMOE_VERSION_NUMBER;
}

const char* tilemoe_status_name(tilemoe_status status) {
  switch (status) {
    case TILEMOE_SUCCESS: return "success";
    case TILEMOE_INVALID_ARGUMENT: return "invalid argument";
    case TILEMOE_UNSUPPORTED: return "unsupported";
    case TILEMOE_DEVICE_ERROR: return "device error";
    case TILEMOE_INTERNAL_ERROR: return "internal error";
  }
  return "unknown status";
}

const char* tilemoe_last_error(void) {
  return last_error.c_str();
}

size_t tilemoe_dtype_size(tilemoe_dtype dtype) {
  switch (dtype) {
    case TILEMOE_FLOAT32:
    case TILEMOE_INT32: return 4;
    case TILEMOE_BFLOAT16:
    case TILEMOE_FLOAT16: return 2;
    case TILEMOE_INT64: return 8;
  }
  return 0;
}

const char* tilemoe_dtype_name(tilemoe_dtype dtype) {
  switch (dtype) {
    case TILEMOE_FLOAT32: return "float32";
    case TILEMOE_BFLOAT16: return "bfloat16";
    case TILEMOE_FLOAT16: return "float16";
    case TILEMOE_INT32: return "int32";
    case TILEMOE_INT64: return "int64";
  }
  return "unknown dtype";
}

int tilemoe_activation_gated(tilemoe_activation activation) {
  return tilemoe::activation_kind(activation).gated;
}

const char* tilemoe_activation_name(tilemoe_activation activation) {
  const char* const name = tilemoe::activation_kind(activation).name;
  return name ? name : "unknown activation";
}

int tilemoe_device_available(tilemoe_device device) {
  return guarded("tilemoe_device_available", [&] { tilemoe::backend_for(device); }) ==
         TILEMOE_SUCCESS;
}

const char* tilemoe_device_description(tilemoe_device device) {
  const tilemoe_status status = guarded("tilemoe_device_description", [&] {
    last_description = tilemoe::backend_for(device).description();
  });
  return status == TILEMOE_SUCCESS ? last_description.c_str() : last_error.c_str();
}

tilemoe_status tilemoe_set_num_threads(int threads) {
  return guarded("tilemoe_set_num_threads", [&] {
    TILEMOE_CHECK(threads >= 0 && threads <= tilemoe::limits::kMaxThreads,
                  "threads is " << threads << ", expected a value in [0, "
                                << tilemoe::limits::kMaxThreads << "]");
    tilemoe::set_num_threads(threads);
  });
}

int tilemoe_num_threads(void) {
  return tilemoe::num_threads();
}

tilemoe_status tilemoe_set_cuda_arch(const char* name) {
  return guarded("tilemoe_set_cuda_arch", [&] { tilemoe::cuda::set_arch(name); });
}

const char* tilemoe_cuda_arch(void) {
  const tilemoe_status status =
      guarded("tilemoe_cuda_arch", [&] { last_description = tilemoe::cuda::describe_arch(); });
  return status == TILEMOE_SUCCESS ? last_description.c_str() : last_error.c_str();
}

// Older names.
tilemoe_status tilemoe_set_cuda_kit(const char* name) {
  return tilemoe_set_cuda_arch(name);
}

const char* tilemoe_cuda_kit(void) {
  return tilemoe_cuda_arch();
}

tilemoe_status tilemoe_routing_capacity(const tilemoe_routing_spec* spec, int64_t* capacity) {
  return guarded("tilemoe_routing_capacity", [&] {
    check_out(capacity, "capacity");
    *capacity = tilemoe::complete(spec).capacity;
  });
}

tilemoe_status tilemoe_routing_bytes(const tilemoe_routing_spec* spec, size_t* bytes) {
  return guarded("tilemoe_routing_bytes", [&] {
    check_out(bytes, "bytes");
    *bytes = tilemoe::routing_bytes(tilemoe::complete(spec));
  });
}

tilemoe_status tilemoe_routing_workspace_bytes(const tilemoe_routing_spec* spec, size_t* bytes) {
  return guarded("tilemoe_routing_workspace_bytes", [&] {
    check_out(bytes, "bytes");
    const tilemoe_routing_spec complete = tilemoe::complete(spec);
    *bytes = tilemoe::backend_of_build(complete.device).routing_scratch_bytes(complete);
  });
}

tilemoe_status tilemoe_routing_bind(const tilemoe_routing_spec* spec, void* memory, size_t bytes,
                                    tilemoe_routing* routing) {
  return guarded("tilemoe_routing_bind", [&] {
    tilemoe::write_routing(tilemoe::bind_routing(tilemoe::complete(spec), memory, bytes), routing);
  });
}

tilemoe_status tilemoe_routing_layout(tilemoe_routing_kind kind, tilemoe_routing_array* arrays,
                                      int32_t* count) {
  return guarded("tilemoe_routing_layout", [&] {
    check_out(arrays, "arrays");
    check_out(count, "count");
    *count = tilemoe::routing_layout(kind, arrays);
  });
}

tilemoe_status tilemoe_route_tokens_workspace_bytes(const tilemoe_routing_spec* spec, int64_t d,
                                                    size_t* bytes) {
  return guarded("tilemoe_route_tokens_workspace_bytes", [&] {
    check_out(bytes, "bytes");
    *bytes = tilemoe::route_tokens_workspace_bytes(tilemoe::complete(spec), d);
  });
}

tilemoe_status tilemoe_router_logits_workspace_bytes(tilemoe_device device, int64_t T, int64_t E,
                                                     int64_t d, tilemoe_dtype weight_dtype,
                                                     size_t* bytes) {
  return guarded("tilemoe_router_logits_workspace_bytes", [&] {
    check_out(bytes, "bytes");
    *bytes = tilemoe::router_logits_workspace_bytes(device, T, E, d, weight_dtype);
  });
}

tilemoe_status tilemoe_router_losses_workspace_bytes(tilemoe_device device, int64_t T, int64_t E,
                                                     size_t* bytes) {
  return guarded("tilemoe_router_losses_workspace_bytes", [&] {
    check_out(bytes, "bytes");
    *bytes = tilemoe::router_losses_workspace_bytes(device, T, E);
  });
}

tilemoe_status tilemoe_saved_bytes(const tilemoe_experts* experts,
                                   const tilemoe_routing_spec* routing, tilemoe_saved_size* size) {
  return guarded("tilemoe_saved_bytes", [&] {
    tilemoe::write_struct("size", size, tilemoe::saved_bytes(experts, routing));
  });
}

tilemoe_status tilemoe_workspace_bytes(const tilemoe_workspace_query* query, size_t* bytes) {
  return guarded("tilemoe_workspace_bytes", [&] {
    check_out(bytes, "bytes");
    *bytes = tilemoe::workspace_bytes(query);
  });
}

tilemoe_status tilemoe_packed_lora_bytes(const tilemoe_experts* experts, size_t* bytes) {
  return guarded("tilemoe_packed_lora_bytes", [&] {
    check_out(bytes, "bytes");
    *bytes = tilemoe::packed_lora_bytes(experts);
  });
}

tilemoe_status tilemoe_packed_lora_bind(const tilemoe_experts* experts,
                                        const tilemoe_weights* weights, void* memory, size_t bytes,
                                        tilemoe_packed_lora* packed) {
  return guarded("tilemoe_packed_lora_bind", [&] {
    tilemoe::write_struct("packed", packed,
                          tilemoe::bind_packed_lora(experts, weights, memory, bytes, packed));
  });
}

tilemoe_status tilemoe_pack_lora(const tilemoe_experts* experts, const tilemoe_pack_lora_args* args,
                                 tilemoe_packed_lora* packed) {
  return guarded("tilemoe_pack_lora", [&] {
    tilemoe::read_struct("packed", packed);  // its size, before the memory is written
    tilemoe::write_struct("packed", packed, tilemoe::pack_lora(experts, args));
  });
}

const char* tilemoe_format_name(tilemoe_format format) {
  return tilemoe::format_name(format);
}

// tilemoe_top_k(args), and so on.
#define TILEMOE_OF_ARGS(name)                                        \
  tilemoe_status tilemoe_##name(const tilemoe_##name##_args* args) { \
    return guarded("tilemoe_" #name, [&] { tilemoe::name(args); });  \
  }
TILEMOE_OF_ARGS(top_k)
TILEMOE_OF_ARGS(top_k_scores)
TILEMOE_OF_ARGS(router_backward)
TILEMOE_OF_ARGS(router_logits)
TILEMOE_OF_ARGS(router_losses)
TILEMOE_OF_ARGS(sum_rows)
TILEMOE_OF_ARGS(dequantize)
TILEMOE_OF_ARGS(quantize_fp8)
#undef TILEMOE_OF_ARGS

// tilemoe_route_top_k(routing, args), and so on.
#define TILEMOE_OF_ROUTING(name)                                                               \
  tilemoe_status tilemoe_##name(tilemoe_routing* routing, const tilemoe_##name##_args* args) { \
    return guarded("tilemoe_" #name, [&] { tilemoe::name(routing, args); });                   \
  }
TILEMOE_OF_ROUTING(route_top_k)
TILEMOE_OF_ROUTING(route_tokens)
TILEMOE_OF_ROUTING(route_general)
TILEMOE_OF_ROUTING(route_rounded)
TILEMOE_OF_ROUTING(route_grouped)
#undef TILEMOE_OF_ROUTING

// tilemoe_forward(experts, args), and so on.
#define TILEMOE_OF_EXPERTS(name)                                             \
  tilemoe_status tilemoe_##name(const tilemoe_experts* experts,              \
                                const tilemoe_##name##_args* args) {         \
    return guarded("tilemoe_" #name, [&] { tilemoe::name(experts, args); }); \
  }
TILEMOE_OF_EXPERTS(forward)
TILEMOE_OF_EXPERTS(backward)
TILEMOE_OF_EXPERTS(gathered_mm)
TILEMOE_OF_EXPERTS(gathered_mm_backward)
TILEMOE_OF_EXPERTS(combine_mm)
TILEMOE_OF_EXPERTS(combine_mm_backward)
#undef TILEMOE_OF_EXPERTS

tilemoe_status tilemoe_mm_workspace_bytes(const tilemoe_mm_workspace_query* query, size_t* bytes) {
  return guarded("tilemoe_mm_workspace_bytes", [&] {
    check_out(bytes, "bytes");
    *bytes = tilemoe::mm_workspace_bytes(query);
  });
}

}  // extern "C"

namespace tilemoe {

const Backend& cpu_backend() {
  return cpu::backend();
}

const Backend& backend_of_build(tilemoe_device device) {
  TILEMOE_CHECK(device == TILEMOE_CPU || device == TILEMOE_CUDA,
                "device is " << static_cast<int>(device) << ", expected cpu (0) or cuda (1)");
  return device == TILEMOE_CUDA ? cuda::backend_of_build() : cpu_backend();
}

const Backend& backend_for(tilemoe_device device) {
  return device == TILEMOE_CUDA ? cuda::backend() : backend_of_build(device);
}

void set_num_threads(int threads) {
  cpu::set_num_threads(threads);
}
int num_threads() noexcept {
  return cpu::num_threads();
}

}  // namespace tilemoe
