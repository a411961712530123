// Keeps signal handlers off a thread while it computes.
//
// oneDNN's float32 products without packing point the stack register at a buffer on the heap
// (jit_avx512_common_gemm_f32 and jit_avx_gemm_f32, K > 84; uxlfoundation/oneDNN#4845). A handler
// that runs meanwhile has its frame, 3 kB with AVX-512, written over whatever lies below that
// buffer.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace tilemoe::cpu {

// Signals that the thread did not cause itself wait until the object goes. Those of its own faults
// do not: held ones would end the process without the handler that reports them.
class HeldSignals {
 public:
  HeldSignals() {
    sigset_t held;
    sigfillset(&held);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
      sigdelset(&held, fault);
    pthread_sigmask(SIG_BLOCK, &held, &before_);
  }
  ~HeldSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tilemoe::cpu
