// Facts of a GPU and of a build without CUDA for `tilemoe doctor`.
#pragma once

#include <string>

namespace tilemoe::app {

// Makes it the current device of this thread. Throws std::runtime_error if no such GPU exists.
void use_gpu(int index);
// Returns what this build lacks for a GPU, what this machine has of it, how to get the rest: a
// clause, or nothing in a build with the CUDA backend, which gives its reasons itself.
std::string what_the_build_lacks();

}  // namespace tilemoe::app
