// Keeps signal handlers and pthread_cancel() off a thread while it computes.
//
// oneDNN's float32 GEMMs without packing point the stack register at a buffer on the heap
// (jit_avx512_common_gemm_f32 and jit_avx_gemm_f32, K > 84; uxlfoundation/oneDNN#4845). A handler
// that runs meanwhile has its frame, 3 kB with AVX-512, written over whatever lies below that
// buffer. Cancellation unwinds the stack at a wait, past functions that must not throw.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace tilemoe::cpu {

// Cancellation, and signals that the thread did not cause itself, wait until the object is
// destroyed. Signals of its own faults do not wait: held ones would end the process without the
// handler that reports them.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
      sigdelset(&blocked, fault);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancellation_before_);
  }
  ~BlockedSignals() {
    int blocked = 0;
    pthread_setcancelstate(cancellation_before_, &blocked);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
  int cancellation_before_ = 0;
};

}  // namespace tilemoe::cpu
