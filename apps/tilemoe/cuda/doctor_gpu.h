// What `tilemoe doctor` needs to know of a GPU and of a build without CUDA.
#pragma once

#include <string>

namespace tilemoe::app {

// Makes it the current device of this thread. Throws std::runtime_error if there is no such GPU.
void use_gpu(int index);
// What this build lacks for a GPU, what this machine has of it and how to get the rest: a clause, or
// nothing in a build with the CUDA backend, which gives its reasons itself.
std::string what_the_build_lacks();

}  // namespace tilemoe::app
