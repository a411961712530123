// The registry of the cases of check, bench and the tests, on every backend.
#pragma once

#include <string_view>
#include <vector>

#include "case.h"

namespace tilemoe::verify {

// The environment has TILEMOE_CASES=reduced: a run under a sanitizer, which takes ten times as
// long.
bool reduced_run();

// All verification cases, in each of their dtypes ("swiglu/bfloat16"), without the huge ones; in a
// reduced run the quick ones.
const std::vector<Case>& verification_cases();

// Whether this arch, the first word of tilemoe_cuda_arch(), has the kernels of the case's recipe.
bool arch_computes(std::string_view arch, const Case& one);

// Cases to be timed: python/tilemoe/bench/layers.inc, a GPU's in bfloat16, a CPU's in float32.
// python/tilemoe/bench reads the same list for PyTorch.
const std::vector<Case>& bench_cases();

// Cases of more than 2^31 elements. They need tens of gigabytes and are run by name only.
const std::vector<Case>& huge_cases();

// Any case by its name, in a reduced run too; null if no case has it.
const Case* find_case(std::string_view name);

// The same case on small whole numbers, with an activation that keeps them whole. Cases with token
// rounding have none, since rounding computes the scores; nor do huge and wide cases, whose sums
// over rows or over d exceed what float32 represents exactly.
bool has_integer_form(const Case& original);
Case integer_form(Case original);

}  // namespace tilemoe::verify
