// The functions of the CUDA runtime that the library and its verification call, on the simulated
// GPU. Work is queued and runs when the host waits for it, so that launches with PDL overlap.
#include "simulator/machine/runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "simulator/machine/machine.h"
#include "simulator/tensor_map.h"

using tilemoe::simulator::Launch;
using tilemoe::simulator::Machine;

namespace tilemoe::simulator {
namespace {

// Of a kernel on the current device.
int& max_dynamic_bytes(const void* kernel) {
  static std::map<std::pair<size_t, const void*>, int> bytes;
  return bytes[{Machine::instance().device_index(), kernel}];
}
constexpr size_t kDefaultMaxBytes = 48 * 1024;

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::shared_ptr<const void> call, size_t call_bytes, void (*run)(const void*)) {
  Launch started;
  started.kernel = kernel;
  started.call = std::move(call);
  started.call_bytes = call_bytes;
  started.run = run;
  started.shape = {
      .grid = config.gridDim, .block = config.blockDim, .dynamic_bytes = config.dynamicSmemBytes};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension)
      started.shape.cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      started.shape.pdl = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  const size_t allowed = std::max(kDefaultMaxBytes, static_cast<size_t>(max_dynamic_bytes(kernel)));
  if (config.dynamicSmemBytes > allowed) return cudaErrorInvalidValue;
  return Machine::instance().launch(std::move(started));
}

__attribute__((noinline)) void leave_scraps() {
  const Thread& thread = *Machine::current();
  Random random = thread.block->machine->random_of(thread);
  std::array<uint64_t, 1024> scraps;
  constexpr size_t kRandom = 16;
  for (size_t i = 0; i < kRandom; ++i) scraps[i] = random.next();
  for (size_t i = kRandom; i < scraps.size(); i += kRandom)
    std::copy_n(scraps.begin(), kRandom, scraps.begin() + i);
  asm volatile("" : : "r"(scraps.data()) : "memory");  // they are wanted
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  if (value > Machine::instance().device().shared_bytes) return cudaErrorInvalidValue;
  max_dynamic_bytes(kernel) = value;
  return cudaSuccess;
}

cudaError_t get_attributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  const DeviceKind& device = Machine::instance().device();
  attributes->binaryVersion = attributes->ptxVersion = 10 * device.major + device.minor;
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

}  // namespace tilemoe::simulator

namespace {

bool is_current(int device) {
  return device == static_cast<int>(Machine::instance().device_index());
}
bool is_of_device(const void* memory) {
  return Machine::instance().memory().has(memory);
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* size, const cuuint64_t* stride_bytes, const cuuint32_t* box,
                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                CUtensorMapFloatOOBfill fill) {
  try {
    tilemoe::simulator::encode_tensor_map({.data_type = type,
                                           .rank = rank,
                                           .address = reinterpret_cast<uint64_t>(address),
                                           .size = size,
                                           .stride_bytes = stride_bytes,
                                           .box = box,
                                           .element_strides = element_strides,
                                           .interleave = interleave,
                                           .swizzle = swizzle,
                                           .l2_promotion = l2_promotion,
                                           .out_of_bounds_fill = fill},
                                          map);
  } catch (const std::invalid_argument&) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
  Machine& machine = Machine::instance();
  if (is_of_device(to)) {
    if (bytes > 0 && !machine.memory().allocated(to, bytes)) return cudaErrorInvalidValue;
    mark_written(machine.memory().cells(), machine.memory().offset(to), bytes);
  }
  if (is_of_device(from) && bytes > 0 && !machine.memory().allocated(from, bytes))
    return cudaErrorInvalidValue;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = Machine::instance().memory().allocate(bytes);
  return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  const cudaError_t error = Machine::instance().synchronize();
  return Machine::instance().memory().release(memory) ? error : cudaErrorInvalidValue;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  const cudaError_t error = Machine::instance().synchronize();
  return error != cudaSuccess ? error : copy(to, from, bytes);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  Machine::instance().enqueue([=] { copy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (bytes > 0 && !Machine::instance().memory().allocated(to, bytes)) return cudaErrorInvalidValue;
  Machine::instance().enqueue([=] {
    std::memset(to, value, bytes);
    Machine& machine = Machine::instance();
    mark_written(machine.memory().cells(), machine.memory().offset(to), bytes);
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t error = cudaMemsetAsync(to, value, bytes, nullptr);
  return error != cudaSuccess ? error : Machine::instance().synchronize();
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return Machine::instance().synchronize();
}
cudaError_t cudaDeviceSynchronize() {
  return Machine::instance().synchronize();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  Machine::instance().count_device_query();
  *device = static_cast<int>(Machine::instance().device_index());
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return is_current(device) ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(Machine::instance().device_index()) + 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_current(device)) return cudaErrorInvalidDevice;
  const auto& kind = Machine::instance().device();
  *properties = {};
  kind.name.copy(properties->name, sizeof(properties->name) - 1);
  properties->major = kind.major;
  properties->minor = kind.minor;
  properties->multiProcessorCount = kind.sms;
  properties->sharedMemPerBlockOptin = static_cast<size_t>(kind.shared_bytes);
  properties->sharedMemPerBlock = 48 * 1024;
  properties->l2CacheSize = 50 << 20;
  properties->totalGlobalMem = size_t{16} << 30;
  return cudaSuccess;
}
// Of memory alone, whose bandwidth is that of an H100.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!is_current(device)) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrMemoryClockRate: *value = 2'619'000; return cudaSuccess;  // kHz
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; return cudaSuccess;  // bits
    default: return cudaErrorInvalidValue;
  }
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *found = known ? reinterpret_cast<void*>(&encode) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    default: return "a CUDA error";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "the simulator ended a launch after a finding"
                                         : "an error of the simulated runtime";
}
}
