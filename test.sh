#!/usr/bin/env bash
# Sets this machine up, builds TileMoE and runs its tests. ./test.sh --help has the options.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"

usage() {
  cat <<END
usage: ./test.sh [--torch | --all | --newest] [options of ctest]

Installs missing packages, builds TileMoE and runs its tests: about 12 minutes on two cores the first
time, 18 with a CUDA compiler. Tests that require a GPU run only if the machine has one.

  --torch        also build the PyTorch package and run its tests (downloads torch, 2 GB)
  --all          all tests of CI: every GPU architecture, the long tests, the PyTorch and JAX packages,
                 the address, undefined behaviour and thread sanitizers; 10 GB of disk
  --newest       the packages alone, with the newest torch, transformers, PEFT, TRL, torchtitan and jax
  -R <regex>     only tests whose names match, for instance -R '^Layer' or -R python
  -E <regex>     exclude tests whose names match
  PRESET=<name>  another build of CMakePresets.json: release (the default), debug, asan, tsan, ubsan

The PyTorch package alone: scripts/test_torch.sh.
END
}

what=
case ${1:-} in
--torch | --all | --newest) what=${1#--} && shift ;;
esac
case " $* " in
*" --help "* | *" -h "*) usage && exit ;;
esac
[ "$what" != newest ] || [ "$#" = 0 ] ||
  die "--newest takes no options; scripts/test_torch.sh and scripts/test_jax.sh do."
cd "$root"

passed=0
failed=0
finish() {
  local status=$? note=
  [ "$status" = 0 ] && [ -z "$what" ] &&
    note="; the PyTorch package was not tested (./test.sh --torch)"
  [ "$((passed + failed))" = 0 ] || printf '\n%d passed, %d failed%s\n' "$passed" "$failed" "$note" >&2
}
trap finish EXIT

# How often a JUnit file (pytest's is one line) has an element.
elements() { grep -Eo "<($2)[ />]" "$1" | wc -l; }

# Adds a JUnit file's tests to the sums.
count() {
  local bad
  bad=$(elements "$1" 'failure|error' || true)
  failed=$((failed + bad))
  passed=$((passed + $(elements "$1" testcase || true) - bad - $(elements "$1" skipped || true)))
}

# The kernels of this machine's GPU, or Hopper's.
gpu_archs() {
  case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1) in
  8.*) echo 80 ;;
  10.*) echo '80;100f' ;;
  12.*) echo '80;120' ;;
  *) echo 90a ;;
  esac
}

# test_preset <preset> <options of cmake>... -- <options of ctest>...
test_preset() {
  local preset=$1 options=() only=() results skipped unexpected may_skip=
  shift
  while [ "$1" != -- ]; do options+=("$1") && shift; done
  shift
  build "$preset" "" "${options[@]}"
  if ! nvidia-smi -L >/dev/null 2>&1; then
    say "no GPU found: the tests labelled gpu are NOT run"
    only+=(gpu)
  fi
  [ "$what" = all ] || only+=(long)
  say "testing (preset $preset)"
  results=$root/build/$preset/tests.xml
  rm -f "$results"
  [ "${#only[@]}" = 0 ] || only=(-LE "^($(IFS='|' && echo "${only[*]}"))\$")
  ctest --preset "$preset" -j "$(nproc)" --progress --output-junit "$results" "${only[@]}" "$@" ||
    { count "$results" && die "tests failed; see the output above and" \
      "build/$preset/Testing/Temporary/LastTest.log."; }
  count "$results"

  # The names of the tests that skipped themselves; on one GPU, the test of two may.
  [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ] ||
    may_skip=$'DeviceLayerTest.GivesTheSameBitsOnEveryDevice\nSumRows.ReadsAnotherGpu'
  skipped=$(sed -n 's/.*<testcase name="\([^"]*\)".* status="notrun".*/\1/p' "$results")
  unexpected=$(printf '%s' "$skipped" | grep -Fxv "$may_skip" || true)
  [ -z "$unexpected" ] || die "tests were skipped unexpectedly: ${unexpected//$'\n'/ }"
}

# test_package <framework> <option>...
test_package() {
  local framework=$1 status=0 file
  shift
  rm -rf "build/$framework-tests"
  "scripts/test_$framework.sh" "$@" || status=$?
  for file in build/"$framework"-tests/*.xml; do
    [ ! -e "$file" ] || count "$file"
  done
  [ "$status" = 0 ] || exit "$status"
}

require build train test
require_python
case $what in
all)
  require_nvcc
  test_preset ci -DTILEMOE_ALL_TESTS=ON -- "$@"
  scripts/docs.sh
  test_package torch --all
  test_package jax
  test_preset asan -- "$@"
  test_preset tsan -- "$@"
  ;;
newest)
  test_package torch --newest
  test_package jax --newest
  ;;
*)
  test_preset "${PRESET:-release}" -DTILEMOE_CUDA_ARCHS="$(gpu_archs)" -- "$@"
  [ "$what" != torch ] || test_package torch
  ;;
esac
