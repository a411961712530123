// The threads of the CPU backend. Work is cut into tasks whose number and contents depend on the
// problem alone, and a task writes only its own output, so results do not depend on the number of
// threads or on which thread runs which task.
#pragma once

#include <cstdint>
#include <memory>

namespace tilemoe::cpu {

// Threads that parallel_for may use, the calling one included.
int num_threads() noexcept;
// 0: one per core. Throws Error with kDeviceError if the system starts fewer, which are then used.
// Not to be called while another thread is inside the library.
void set_num_threads(int threads);

namespace detail {
using TaskFunction = void (*)(void* context, int64_t task, int worker);
void run_tasks(int64_t tasks, TaskFunction function, void* context);
}  // namespace detail

// Calls body(task, worker) for every task in [0, tasks), in ascending order of starting; worker is
// in [0, num_threads()) and no two running tasks share it. Returns when all are done; the first
// exception is thrown again here. A call from inside a task, or while another thread's call runs,
// is done by the caller alone, as worker 0 of its own. Signals wait meanwhile (blocked_signals.h
// has the reason): their handlers run when the call has returned.
template <class Body>
void parallel_for(int64_t tasks, Body&& body) {
  using Callable = std::remove_reference_t<Body>;
  detail::run_tasks(
      tasks,
      [](void* context, int64_t task, int worker) {
        (*static_cast<Callable*>(context))(task, worker);
      },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace tilemoe::cpu
