// Counts what the library allocates. operator new is replaced for the whole program; the malloc
// family is wrapped at link time (--wrap), for the objects linked into the program. oneDNN, a
// shared library, keeps packing buffers of its own, which are not counted.
#pragma once

#include <cstdint>
#include <functional>

namespace tilemoe::verify {

// Allocations of all threads while `step` runs.
int64_t allocations_of(const std::function<void()>& step);

}  // namespace tilemoe::verify
