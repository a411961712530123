#!/usr/bin/env bash
# Sets this machine up, builds TileMoE and runs every test; those that need a GPU only where there is
# one. Options go to ctest, for instance
# "-R routing". The PyTorch package has tests of its own: scripts/test_torch.sh. PRESET picks another build of CMakePresets.json: PRESET=asan ./test.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
preset=${PRESET:-release}

require build train test
require_python
build "$preset"
cd "$root"
only=()
if ! nvidia-smi -L >/dev/null 2>&1; then
  say "no GPU here: the tests labelled gpu are NOT run"
  only=(-LE '^gpu$')
fi
say "testing (preset $preset)"
ctest --preset "$preset" -j "$(nproc)" "${only[@]}" "$@" ||
  die "tests failed; their output is above and in build/$preset/Testing/Temporary/LastTest.log."
[ -n "${CI:-}" ] || say "the PyTorch package is NOT among what was tested: scripts/test_torch.sh"
