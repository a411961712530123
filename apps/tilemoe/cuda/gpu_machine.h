// The GPU as the bench sees it, with cuBLASLt for the router's products.
#pragma once

#include "bench_machine.h"

namespace tilemoe::app {

const BenchMachine& gpu_machine();

}  // namespace tilemoe::app
