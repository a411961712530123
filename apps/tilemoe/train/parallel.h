// The threads of the trainer's own loops: as many as the library has (tilemoe_num_threads()). Work is
// divided into tasks whose number and contents depend on the problem alone, and a task writes only
// what is its own, so results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>

namespace tilemoe::train {

// Threads that parallel_for uses, the calling one included.
int num_threads();

// Calls body(task, worker) for every task in [0, tasks); worker is in [0, num_threads()) and no two
// running tasks share it. Returns when all are done; the first exception is thrown again here. It is
// called from one thread at a time, and not from inside a task. Signals wait meanwhile: their
// handlers run when the call has returned.
void parallel_for(int64_t tasks, const std::function<void(int64_t task, int worker)>& body);

}  // namespace tilemoe::train
