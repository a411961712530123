#!/usr/bin/env bash
# Tests the PyTorch package as its users get it: builds the wheel (scripts/dist.sh), installs it into
# .venv-torch, which has torch and what the tests need, and runs tests/torch.
#
#   scripts/test_torch.sh [--all | --newest] [options of pytest]
#
# --all adds the long tests, the source distribution, the folder for the kernel hub, and the wheel on
# a system without a compiler; warnings are errors. --newest runs, instead, what may depend on a
# version, in .venv-torch-newest, which has the newest torch, transformers, PEFT, TRL and torchtitan.
# The first time downloads 2.1 GB for each torch.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

what=
case ${1:-} in
--all | --newest) what=${1#--} && shift ;;
esac

# Objects that the tests' builds have compiled already.
export TILEMOE_CUDA_ARCHS=${TILEMOE_CUDA_ARCHS:-80;90a} TILEMOE_SM80_ON_HOPPER=OFF
tests=("$root"/tests/{wheel,torch})
quick=()
[ -n "$what" ] || quick=(-m "not long")
if [ "$what" = all ]; then
  rm -rf build/hub
  scripts/hub.sh --config-settings=cmake.define.TILEMOE_WERROR=ON
  scripts/dist.sh --config-settings=cmake.define.TILEMOE_WERROR=ON
  scripts/test_wheel.sh build/dist/*.whl
  TILEMOE_SDIST=$(echo "$root"/build/dist/*.tar.gz)
  TILEMOE_KERNELS=$(.venv-wheel/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  export TILEMOE_SDIST TILEMOE_KERNELS TILEMOE_HUB=$root/build/hub
  tests+=("$root/tests/distribution")
else
  scripts/dist.sh wheel
fi
wheel=$(echo "$root"/build/dist/*.whl)
export CUDA_VISIBLE_DEVICES='' TILEMOE_WHEEL=$wheel
mkdir -p build/torch-tests

# test_wheel <environment> <JUnit file> <option of pytest>...: installs the wheel into the environment
# and runs tests in up to four processes; from build/, so that Python has the source nowhere on its path.
test_wheel() {
  local environment=$root/$1 results=$root/build/torch-tests/$2.xml
  shift 2
  "$environment/bin/python" -m pip install -q --no-deps --force-reinstall "$wheel" >&2 ||
    die "the wheel cannot be installed into $environment."
  (cd "$root/build" && "$environment/bin/python" -m pytest -q -p no:cacheprovider \
    -n logical --maxprocesses 4 --dist worksteal -o pythonpath="$root/tests/torch" \
    --junitxml="$results" "${quick[@]}" "$@") ||
    die "tests of the PyTorch package failed; their output is above."
}

if [ "$what" != newest ]; then
  say "testing the wheel"
  # One thread in each process, one process per core; tests of several threads set their number.
  OMP_NUM_THREADS=1 test_wheel .venv-torch torch "${tests[@]}" "$@"
  exit 0
fi

require_torch -newest
say "testing the wheel with the newest torch"
# With as many threads as torch takes.
# Sentences about what is missing are the package's own, whichever torch it is.
test_wheel .venv-torch-newest newest-torch \
  "$root"/tests/torch/loading_test.py::{test_import_time,test_needs_no_gpu,test_cpu_library_corrupt} \
  "$root"/tests/torch/loading_test.py::TestCuda::test_float32 \
  "$root"/tests/torch/{operators,functional,pretrain_fsdp,fp8_module,fp8_shards}_test.py "$@"
say "testing the wheel with the newest transformers, PEFT and TRL"
OMP_NUM_THREADS=1 test_wheel .venv-torch-newest newest-transformers \
  "$root"/tests/torch/transformers_{,distributed_,forms_,models_,norm_}test.py \
  "$root"/tests/torch/{private_apis,routing_replay}_test.py \
  "$root"/tests/torch/peft_{,distributed_,operations_,trl_}test.py "$@"

# torchtitan's models and its trainer require this torch.
say "testing torchtitan with the newest torch"
test_wheel .venv-torch-newest torchtitan \
  "$root"/tests/torch/torchtitan_{,models_,trainer_}test.py "$@"
