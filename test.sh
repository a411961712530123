#!/usr/bin/env bash
# Sets this machine up, builds TileMoE and runs every test; those that need a GPU only where there is
# one. A test that skips itself fails the run, but for those named below. Options go to ctest, for
# instance "-R routing". The PyTorch package has tests of its own: scripts/test_torch.sh. PRESET picks
# another build of CMakePresets.json: PRESET=asan ./test.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
preset=${PRESET:-release}

usage() {
  cat <<END
usage: ./test.sh [options of ctest]

Installs missing packages, builds TileMoE with tests, and runs every test: 20 to 45 minutes on two
cores the first time. Tests that need a GPU run only if this machine has one.

  -R <regex>     only the tests whose names match, for instance -R '^Layer' or -R python
  -E <regex>     without those
  PRESET=<name>  another build of CMakePresets.json: release (the default), debug, asan, tsan, ubsan

The PyTorch package has tests of its own: scripts/test_torch.sh.
END
}

case " $* " in
*" --help "* | *" -h "*)
  usage
  exit
  ;;
esac

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
results=$root/build/$preset/tests.xml
ctest --preset "$preset" -j "$(nproc)" --output-junit "$results" "${only[@]}" "$@" ||
  die "tests failed; their output is above and in build/$preset/Testing/Temporary/LastTest.log."

# The names of the tests that skipped themselves; on one GPU, the test of two may.
may_skip=
[ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ] ||
  may_skip=$'DeviceLayerTest.GivesTheSameBitsOnEveryDevice\nSumRows.ReadsAnotherGpu'
skipped=$(sed -n 's/.*<testcase name="\([^"]*\)".* status="notrun".*/\1/p' "$results")
say "$(printf '%s' "$skipped" | grep -c '') tests skipped ${skipped//$'\n'/ }"
unexpected=$(printf '%s' "$skipped" | grep -Fxv "$may_skip" || true)
[ -z "$unexpected" ] || die "these tests may not be skipped: ${unexpected//$'\n'/ }"
[ -n "${CI:-}" ] || say "the PyTorch package is NOT among what was tested: scripts/test_torch.sh"
