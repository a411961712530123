// The program's own loads and stores: simulated sources are compiled with -fsanitize=thread, so
// that the compiler calls one of these functions before each. The sanitizer's runtime is not
// linked.
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "simulator/machine/machine.h"
#include "simulator/machine/synchronization.h"

namespace {

using tilemoe::simulator::AccessKind;
using tilemoe::simulator::Machine;
using tilemoe::simulator::site_of;
using tilemoe::simulator::Thread;

inline void access(const void* address, size_t bytes, AccessKind kind, const void* from) {
  Thread* const thread = Machine::current();
  if (thread == nullptr || thread->inside_machine) return;  // the host's code
  if (static_cast<size_t>(static_cast<const std::byte*>(address) - thread->stack) <
      tilemoe::simulator::Worker::kStackBytes) {
    if (thread->loads_registers)
      thread->block->machine->check_registers(*thread, address, bytes, site_of(from));
    return;
  }
  thread->inside_machine = true;
  thread->block->machine->take_turn(*thread);
  thread->block->machine->ordinary_access(*thread, kind, address, bytes, site_of(from));
  thread->inside_machine = false;
}

inline void volatile_access(void* address, size_t bytes, bool writes, const void* from) {
  Thread* const thread = Machine::current();
  if (thread == nullptr || thread->inside_machine) return;
  thread->inside_machine = true;
  thread->block->machine->take_turn(*thread);
  atomic_access(*thread, address, bytes, writes, !writes, site_of(from));
  thread->inside_machine = false;
}

}  // namespace

#define HOOKS(N)                                                   \
  void __tsan_read##N(void* p) {                                   \
    access(p, N, AccessKind::kRead, __builtin_return_address(0));  \
  }                                                                \
  void __tsan_write##N(void* p) {                                  \
    access(p, N, AccessKind::kWrite, __builtin_return_address(0)); \
  }                                                                \
  void __tsan_unaligned_read##N(void* p) {                         \
    access(p, N, AccessKind::kRead, __builtin_return_address(0));  \
  }                                                                \
  void __tsan_unaligned_write##N(void* p) {                        \
    access(p, N, AccessKind::kWrite, __builtin_return_address(0)); \
  }                                                                \
  void __tsan_volatile_read##N(void* p) {                          \
    volatile_access(p, N, false, __builtin_return_address(0));     \
  }                                                                \
  void __tsan_volatile_write##N(void* p) {                         \
    volatile_access(p, N, true, __builtin_return_address(0));      \
  }                                                                \
  void __tsan_unaligned_volatile_read##N(void* p) {                \
    volatile_access(p, N, false, __builtin_return_address(0));     \
  }                                                                \
  void __tsan_unaligned_volatile_write##N(void* p) {               \
    volatile_access(p, N, true, __builtin_return_address(0));      \
  }

// Atomics of the host's code in the same files: they are what they say.
#define ATOMICS(N, T)                                                                             \
  T __tsan_atomic##N##_load(const volatile T* p, int) {                                           \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                               \
  void __tsan_atomic##N##_store(volatile T* p, T value, int) {                                    \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                               \
  T __tsan_atomic##N##_exchange(volatile T* p, T value, int) {                                    \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                       \
  }                                                                                               \
  T __tsan_atomic##N##_fetch_add(volatile T* p, T value, int) {                                   \
    return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);                                        \
  }                                                                                               \
  T __tsan_atomic##N##_fetch_sub(volatile T* p, T value, int) {                                   \
    return __atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST);                                        \
  }                                                                                               \
  int __tsan_atomic##N##_compare_exchange_strong(volatile T* p, T* expected, T value, int, int) { \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST,               \
                                       __ATOMIC_SEQ_CST);                                         \
  }                                                                                               \
  int __tsan_atomic##N##_compare_exchange_weak(volatile T* p, T* expected, T value, int, int) {   \
    return __atomic_compare_exchange_n(p, expected, value, true, __ATOMIC_SEQ_CST,                \
                                       __ATOMIC_SEQ_CST);                                         \
  }

extern "C" {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-declarations"
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
ATOMICS(8, uint8_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
void __tsan_read_range(void* p, size_t bytes) {
  access(p, bytes, AccessKind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  access(p, bytes, AccessKind::kWrite, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
#pragma GCC diagnostic pop
}
