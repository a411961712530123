// CUDA C++ for simulated kernels, included before everything else: what nvcc has built in. A
// kernel's source is compiled unchanged; its PTX instructions come from this folder's cuda/ptx.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#include "simulator/intrinsics.h"
#include "simulator/machine/runtime.h"
#include "simulator/registers.h"

// All archs are compiled at once. The architecture of a kernel's code decides only whether it may
// use PDL; the simulated device reports it (cudaFuncGetAttributes).
#define __CUDA_ARCH__ 900

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static thread_local  // a block is a thread of the operating system
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::tilemoe::simulator::registers().thread_index)
#define blockIdx (::tilemoe::simulator::registers().block_index)

// No macros: members of a launch have the same names.
template <dim3 tilemoe::simulator::Registers::*kSize, unsigned dim3::*kDimension>
struct SimulatedSize {
  operator unsigned() const { return (tilemoe::simulator::registers().*kSize).*kDimension; }
};
template <dim3 tilemoe::simulator::Registers::*kSize>
struct SimulatedSizes {
  SimulatedSize<kSize, &dim3::x> x;
  SimulatedSize<kSize, &dim3::y> y;
  SimulatedSize<kSize, &dim3::z> z;
};
inline constexpr SimulatedSizes<&tilemoe::simulator::Registers::block_size> blockDim{};
inline constexpr SimulatedSizes<&tilemoe::simulator::Registers::grid_size> gridDim{};

namespace tilemoe::simulator {

// A number's bits on their way between lanes.
template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// A read-modify-write of memory, all at once.
template <class T, class Change>
__attribute__((noinline)) T change_atomically(T* at, const Change& change) {
  atomic_begin(at, sizeof(T), true, true);
  const uint64_t before = raw_load(at, sizeof(T));
  raw_store(at, sizeof(T), to_bits<T>(change(from_bits<T>(before))));
  atomic_end();
  return from_bits<T>(before);
}

}  // namespace tilemoe::simulator

// ---- the runtime's templates

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  struct Call {
    void (*kernel)(Params...);
    std::tuple<Params...> params;
  };
  const auto call = std::make_shared<Call>(Call{kernel, {std::forward<Args>(args)...}});
  return tilemoe::simulator::launch(*config, reinterpret_cast<const void*>(kernel), call,
                                    sizeof(Call), [](const void* started) {
                                      const Call& its = *static_cast<const Call*>(started);
                                      const auto enter = [kernel = its.kernel](Params... params) {
                                        tilemoe::simulator::leave_scraps();
                                        kernel(params...);
                                      };
                                      std::apply(enter, its.params);
                                    });
}
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
  return tilemoe::simulator::set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Params...)) {
  return tilemoe::simulator::get_attributes(attributes, reinterpret_cast<const void*>(kernel));
}

// ---- the threads of a block and a warp

using tilemoe::simulator::__syncthreads;
using tilemoe::simulator::__syncthreads_or;
using tilemoe::simulator::__syncwarp;
using tilemoe::simulator::__threadfence;
using tilemoe::simulator::cudaGridDependencySynchronize;
using tilemoe::simulator::cudaTriggerProgrammaticLaunchCompletion;

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  using namespace tilemoe::simulator;
  return from_bits<T>(shuffle(mask, to_bits(value), Shuffle::kFrom, lane, width));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  using namespace tilemoe::simulator;
  return from_bits<T>(shuffle(mask, to_bits(value), Shuffle::kXor, lanes, width));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  using namespace tilemoe::simulator;
  return from_bits<T>(shuffle(mask, to_bits(value), Shuffle::kUp, static_cast<int>(lanes), width));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
  using namespace tilemoe::simulator;
  return from_bits<T>(
      shuffle(mask, to_bits(value), Shuffle::kDown, static_cast<int>(lanes), width));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return tilemoe::simulator::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return tilemoe::simulator::ballot(mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return tilemoe::simulator::ballot(mask, predicate == 0) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  return tilemoe::simulator::match_any(mask, tilemoe::simulator::to_bits(value));
}
#define TILEMOE_SIMULATED_REDUCE(name, expression)                       \
  template <class T>                                                     \
  T name(unsigned mask, T value) {                                       \
    static_assert(sizeof(T) == 4);                                       \
    uint64_t all[32];                                                    \
    const unsigned lanes = tilemoe::simulator::gather(mask, value, all); \
    bool first = true;                                                   \
    T a{};                                                               \
    for (int lane = 0; lane < 32; ++lane) {                              \
      if ((lanes >> lane & 1) == 0) continue;                            \
      const T b = static_cast<T>(all[lane]);                             \
      a = first ? b : expression;                                        \
      first = false;                                                     \
    }                                                                    \
    return a;                                                            \
  }
TILEMOE_SIMULATED_REDUCE(__reduce_add_sync, static_cast<T>(a + b))
TILEMOE_SIMULATED_REDUCE(__reduce_min_sync, (b < a ? b : a))
TILEMOE_SIMULATED_REDUCE(__reduce_max_sync, (a < b ? b : a))
TILEMOE_SIMULATED_REDUCE(__reduce_or_sync, static_cast<T>(a | b))
#undef TILEMOE_SIMULATED_REDUCE

// ---- memory

template <class T>
T atomicAdd(T* at, T value) {
  return tilemoe::simulator::change_atomically(
      at, [=](T before) { return static_cast<T>(before + value); });
}
template <class T>
T atomicOr(T* at, T value) {
  return tilemoe::simulator::change_atomically(
      at, [=](T before) { return static_cast<T>(before | value); });
}
template <class T>
T atomicMax(T* at, T value) {
  return tilemoe::simulator::change_atomically(
      at, [=](T before) { return before < value ? value : before; });
}
template <class T>
T atomicMin(T* at, T value) {
  return tilemoe::simulator::change_atomically(
      at, [=](T before) { return value < before ? value : before; });
}
template <class T>
T atomicExch(T* at, T value) {
  return tilemoe::simulator::change_atomically(at, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* at, T expected, T value) {
  return tilemoe::simulator::change_atomically(
      at, [=](T before) { return before == expected ? value : before; });
}
// Around L1, which is not simulated: memory is one.
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
size_t __cvta_generic_to_shared(const T* at) {
  return tilemoe::simulator::to_shared(at);
}

// ---- arithmetic

using std::max;
using std::min;

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline float __uint_as_float(unsigned x) {
  return tilemoe::simulator::from_bits<float>(x);
}
inline unsigned __float_as_uint(float x) {
  return static_cast<unsigned>(tilemoe::simulator::to_bits(x));
}
inline float __int_as_float(int x) {
  return tilemoe::simulator::from_bits<float>(static_cast<unsigned>(x));
}
inline int __float_as_int(float x) {
  return static_cast<int>(tilemoe::simulator::to_bits(x));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> 4 * i & 7;
    result |= static_cast<unsigned>(bytes >> 8 * which & 0xff) << 8 * i;
  }
  return result;
}
// 0 if the divisor exceeds 2^126.
inline float __fdividef(float x, float y) {
  return std::fabs(y) > 0x1p126f ? x * 0.f : x / y;
}
// Rounded after each operation: nothing is contracted here anyway.
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float rsqrtf(float x) {
  return 1.f / std::sqrt(x);
}
