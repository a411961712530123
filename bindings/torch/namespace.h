// The operators' namespace in torch.ops, TILEMOE_TORCH_NAMESPACE of the build.
#pragma once

#include <torch/csrc/stable/library.h>

// torch's macros join and quote the name as it is written; these expand it first.
#define TILEMOE_TORCH_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define TILEMOE_TORCH_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
