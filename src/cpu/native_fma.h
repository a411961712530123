// Compiles a loop twice: for any CPU, and for those with fused multiply-add and 256-bit vectors,
// chosen at run time. Both give the same bits (routing/order.h says why).
#pragma once

namespace tilemoe::cpu {

#define TILEMOE_ALWAYS_INLINE __attribute__((always_inline))

#if defined(__x86_64__)

inline bool has_native_fma() {
  static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return yes;
}

template <class Body>
__attribute__((target("avx2,fma"))) void run_with_native_fma(const Body& body) {
  body();
}

// `body` is a lambda marked TILEMOE_ALWAYS_INLINE: what is inlined into it, and no more, gets the
// instructions.
template <class Body>
void with_native_fma(const Body& body) {
  if (has_native_fma())
    run_with_native_fma(body);
  else
    body();
}

#else  // the base instruction set has it, or nothing has

template <class Body>
void with_native_fma(const Body& body) {
  body();
}

#endif

}  // namespace tilemoe::cpu
