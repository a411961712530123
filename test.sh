#!/usr/bin/env bash
# Sets this machine up, builds TileMoE and runs every test. Options go to ctest, for instance
# "-R routing". PRESET picks another build of CMakePresets.json: PRESET=asan ./test.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
preset=${PRESET:-release}

require build train test
require_python
build "$preset"
say "testing"
cd "$root"
ctest --preset "$preset" -j "$(nproc)" "$@" ||
  die "tests failed; their output is above and in build/$preset/Testing/Temporary/LastTest.log."
