# shellcheck shell=bash
# Set-up and build, for the scripts at the top. Sourced.
#
#   require <group>...  makes sure of the packages of these groups (scripts/packages.sh)
#   require_python      makes sure that .venv has Python and what tests/python/requirements.txt names
#   require_torch [-newest]  makes sure that .venv-torch has torch and what the package's tests need;
#                       with -newest .venv-torch-newest
#   require_jax <version>  makes sure that .venv-jax-<version> has that jax (tests/jax); fails if no
#                       Python here is new enough for it
#   require_docs        makes sure that .venv-docs has what builds the documentation site
#   require_wheel_tools makes sure that .venv-wheel has what makes a wheel portable
#   require_nvcc        makes sure of a CUDA compiler: the machine's own, or one in .venv-cuda
#   build <preset> [<target> [<option of cmake>...]]  configures one of CMakePresets.json and builds
#                       it, or just a target
#
# Each `say` begins a stage; if TILEMOE_STAGES names a file, its time is written there.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Python compiles a module once, into build/, and not in each process that imports it.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$root/build/pycache
# shellcheck source=scripts/packages.sh
. "$root/scripts/packages.sh"

say() {
  printf '\n== %s\n' "$*" >&2
  [ -z "${TILEMOE_STAGES:-}" ] || printf '%(%s)T\t%s\n' -1 "$*" >>"$TILEMOE_STAGES"
}
die() {
  local free
  free=$(($(df --output=avail -k "$root" | tail -1) / 1024))
  printf '\nerror: %s\n' "$*" >&2
  [ "$free" -gt 1000 ] || printf 'The disk of %s is full: %d MB are free.\n' "$root" "$free" >&2
  exit 1
}

is_installed() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Prints the packages of the given groups that are missing, each with its use.
missing_packages() {
  local group package command purpose
  packages | while read -r group package command purpose; do
    case " $* " in *" $group "*) ;; *) continue ;; esac
    is_installed "$package" && continue
    [ "$command" != - ] && command -v "$command" >/dev/null && continue
    printf '%s  %s\n' "$package" "$purpose"
  done
}

require() {
  [ "${TILEMOE_SETUP:-}" != skip ] || return 0
  command -v apt-get >/dev/null || die "apt-get was not found; install the packages of" \
    "scripts/packages.sh, then run the script again with TILEMOE_SETUP=skip."

  local missing names
  missing=$(missing_packages "$@")
  [ -n "$missing" ] || return 0
  names=$(printf '%s\n' "$missing" | awk '{ printf "%s%s", separator, $1; separator = " " }')
  say "missing packages:"
  printf '%s\n' "$missing" | sed 's/^/  /' >&2
  [ "$(id -u)" = 0 ] || die "installing packages requires root; run this command, then the script again:

  sudo apt-get update && sudo apt-get install --no-install-recommends $names"

  say "installing the packages with apt-get"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >&2 || die "apt-get update failed; see the lines above."
  # shellcheck disable=SC2086  # one word a package
  apt-get install -q -y --no-install-recommends $names </dev/null >&2 ||
    die "apt-get could not install: $names; see the lines above."
}

require_python() {
  [ "${TILEMOE_SETUP:-}" != skip ] || return 0
  local environment=$root/.venv
  "$environment/bin/python" -c 'import codespell_lib, matplotlib, numpy, ruff, safetensors' 2>/dev/null && return 0
  say "making .venv with what the Python tests import"
  { python3 -m venv "$environment" &&
    "$environment/bin/python" -m pip install -q -r "$root/tests/python/requirements.txt"; } >&2 ||
    die "the Python packages could not be installed; see the lines above."
}

# Makes a virtual environment of just what requirements files name, and again when they change. Python
# compiles what is imported; all modules would be half a minute of the processor.
pinned_environment() {
  [ "${TILEMOE_SETUP:-}" != skip ] || return 0
  local environment=$root/$1 lock
  shift
  exec {lock}>"$environment.lock"
  flock "$lock"  # another process may be making it
  make_environment "$environment" "$@"
  exec {lock}>&-
}

make_environment() {
  local environment=$1
  shift
  cat "$@" | cmp -s - "$environment/complete" && return 0
  say "making ${environment##*/}"
  { rm -rf "$environment" && "${environment_python:-python3}" -m venv "$environment" &&
    "$environment/bin/python" -m pip install -q --no-deps --no-compile "${@/#/--requirement=}" &&
    cat "$@" >"$environment/complete"; } >&2 ||
    die "the Python packages could not be installed; see the lines above."
}

require_torch() {
  local tests=$root/tests/torch
  pinned_environment ".venv-torch${1:-}" "$tests"/requirements{-tests,"${1:-}"}.txt
}

# Prints a Python of at least this minor version: the default one, another of PATH, or pyenv's.
find_python() {
  local python
  for python in python3 python3.{14..11} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    "$python" -c "import sys; sys.exit(sys.version_info < (3, $1))" 2>/dev/null &&
      printf '%s' "$python" && return
  done
  return 1
}

require_jax() {
  local min_minor=12 environment_python
  [ "$1" != 0.10.2 ] || min_minor=11
  environment_python=$(find_python "$min_minor") || return 1
  pinned_environment ".venv-jax-$1" "$root/tests/jax"/requirements{-tests,"-$1"}.txt
}

require_docs() {
  local environment_python
  environment_python=$(find_python 11) || die "the documentation site needs Python 3.11 or newer."
  pinned_environment .venv-docs "$root/docs/requirements.txt"
}

require_wheel_tools() { pinned_environment .venv-wheel "$root/scripts/wheel.txt"; }

# The packages have the toolkit's libraries in lib, the runtime's under its version alone; the compiler
# and CMake look in lib64, and for the plain name.
name_cuda_libraries() {
  local runtime
  runtime=$(find "$1" -name 'libcudart.so.*' -print -quit) && [ -n "$runtime" ] &&
    ln -sfn "${runtime##*/}" "${runtime%/*}/libcudart.so" &&
    ln -sfn lib "${runtime%/*}64"
}

# The compiler of PATH or /usr/local/cuda, if that is new enough for cmake/Cuda.cmake to take it,
# or else the pinned one.
require_nvcc() {
  [ "${TILEMOE_SETUP:-}" != skip ] || return 0
  [ -z "${CUDACXX:-}" ] || return 0
  local environment=$root/.venv-cuda nvcc
  nvcc=$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc) &&
    "$nvcc" --version | grep -Eq 'release (12\.[5-9]|1[3-9]\.)' && return 0
  if ! [ -e "$environment/complete" ]; then
    say "making .venv-cuda with a CUDA compiler"
    { rm -rf "$environment" && python3 -m venv "$environment" &&
      "$environment/bin/python" -m pip install -q -r "$root/scripts/cuda-compiler.txt" &&
      name_cuda_libraries "$environment" && touch "$environment/complete"; } >&2 ||
      die "the CUDA compiler could not be installed; see the lines above."
  fi
  CUDACXX=$(find "$environment" -path '*/bin/nvcc' -print -quit)
  export CUDACXX
}

build() {
  local preset=$1 target=${2:-}
  say "building (preset $preset; the first time takes a few minutes)"
  (
    cd "$root"
    cmake --preset "$preset" "${@:3}" >&2 &&
      cmake --build --preset "$preset" ${target:+--target "$target"} >&2
  ) || die "the build failed; see the first error above." \
    "'rm -r $root/build/$preset' removes the build folder."
}
