#!/usr/bin/env bash
# Tests tilemoe.jax as its users get it: installs the wheel of build/dist (scripts/dist.sh, which
# scripts/test_torch.sh runs), or a new one if there is none, into an environment of each version of
# jax, and runs tests/jax.
#
#   scripts/test_jax.sh [--newest] [options of pytest]
#
# All tests run with the oldest jax that is supported, next to the torch of .venv-torch. --newest runs,
# instead, the tests of JAX's own interfaces with two newer ones, without torch. Downloads 100 MB for
# each.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

newest=
case ${1:-} in
--newest) newest=yes && shift ;;
esac
wheel=$(echo "$root"/build/dist/*.whl)
[ -e "$wheel" ] || { scripts/dist.sh wheel && wheel=$(echo "$root"/build/dist/*.whl); }
mkdir -p build/jax-tests

# test_wheel <version> <option of pytest>...: from build/, so that Python has the source nowhere on its
# path.
test_wheel() {
  local environment=$root/.venv-jax-$1 results=$root/build/jax-tests/jax-$1.xml
  shift
  "$environment/bin/python" -m pip install -q --no-deps --force-reinstall "$wheel" >&2 ||
    die "the wheel cannot be installed into $environment."
  (cd "$root/build" && OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -q -p no:cacheprovider \
    -n logical --maxprocesses 4 -o pythonpath="$root/tests/jax" --junitxml="$results" "$@") ||
    die "tests of tilemoe.jax failed; their output is above."
}

# next_to_torch <version>: lets the environment import the torch of .venv-torch, which has the same
# Python.
next_to_torch() {
  local site
  site=$(echo "$root/.venv-jax-$1"/lib/python3*/site-packages)
  printf '%s\n' "$root"/.venv-torch/lib/python3*/site-packages >"$site/torch.pth"
}

tests=$root/tests/jax
if [ -z "$newest" ]; then
  say "testing the wheel with jax 0.10.2"
  require_torch ""
  require_jax 0.10.2 || die "jax 0.10.2 needs Python 3.11 or newer."
  next_to_torch 0.10.2
  test_wheel 0.10.2 "$tests" "$@"
  exit 0
fi

for version in 0.11.2 newest; do
  if ! require_jax "$version"; then
    say "no Python 3.12 here: jax $version is NOT tested"
    continue
  fi
  say "testing the wheel with jax $version"
  test_wheel "$version" "$tests"/jax_{fp8,loading,sharding,transforms}_test.py \
    "$tests/jax_gradients_test.py::test_layouts" "$@"
done
