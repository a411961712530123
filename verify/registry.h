// The one registry of cases that drives check, bench and the tests, on every backend.
#pragma once

#include <string_view>
#include <vector>

#include "case.h"

namespace tilemoe::verify {

// The environment has TILEMOE_CASES=reduced: a run under a sanitizer, which takes ten times as
// long.
bool reduced_run();

// All cases that verify, in each of their dtypes ("swiglu/bfloat16"), without the huge ones; in a
// reduced run those that are quick.
const std::vector<Case>& verification_cases();

// Cases to be timed: the table of docs/benchmarks.md, a GPU's in bfloat16, a CPU's in float32.
// python/tilemoe/bench reads the same list for PyTorch.
const std::vector<Case>& bench_cases();

// Cases of more than 2^31 elements. They need tens of gigabytes and are run by name only.
const std::vector<Case>& huge_cases();

// Any case by its name, whatever the environment says; null where there is none.
const Case* find_case(std::string_view name);

// The same case on small whole numbers, with an activation that keeps them whole. There is none
// where the scores cannot be chosen: token rounding computes them; nor of a huge case, whose sums
// over so many rows pass what float32 holds exactly, as those of a wide one do over d.
bool has_integer_form(const Case& original);
Case integer_form(Case original);

}  // namespace tilemoe::verify
