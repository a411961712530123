#!/usr/bin/env bash
# Builds the PyTorch package for other machines, into build/dist:
#
#   scripts/dist.sh [OPTION...]        tilemoe-*.whl and tilemoe-*.tar.gz, the source distribution
#   scripts/dist.sh wheel [OPTION...]  the wheel alone; TILEMOE_DIST names another folder
#   scripts/dist.sh sdist              the source distribution alone
#
# OPTIONs go to `pip wheel`. The wheel brings the distribution's oneDNN and Highway, and takes torch's
# own OpenMP runtime, which torch has loaded before. It has the CUDA library if a CUDA
# compiler is installed, with kernels for TILEMOE_CUDA_ARCHS of the environment and, if
# TILEMOE_SM80_ON_HOPPER is ON, the arch sm80 for Hopper too: without them, for every GPU. CI and
# the tests select less, since this takes long. With TILEMOE_CPU=OFF in the environment it has the CUDA
# library alone.
#
# The wheel needs glibc 2.34. With Debian 12's objects, a static libstdc++ and glibc 2.28's stubs (zig
# c++ 0.17.1), three symbols stay undefined, so 2.28 needs a build on an older distribution:
#   __libc_single_threaded  2.32  std::shared_ptr of GCC 12, in torch's stable tensor
#   _dl_find_object         2.35  the unwinder of GCC 12's libgcc
#   arc4random              2.36  std::random_device of GCC 12's libstdc++, which nothing calls
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
dist=${TILEMOE_DIST:-build/dist}
case ${1:-} in
wheel | sdist) what=$1 && shift ;;
*) what=both ;;
esac

build_sdist() {
  say "building the source distribution"
  rm -f "$dist"/*.tar.gz
  .venv-wheel/bin/python -m build --sdist --outdir "$dist" . >&2 ||
    die "the source distribution could not be built; see the lines above."
}

# Bundles the libraries that a clean machine lacks, with their licences.
bundle() {
  local tools=$root/.venv-wheel/bin licenses package library
  say "bundling the libraries that a clean machine lacks"
  PATH=$tools:$PATH auditwheel repair "$dist"/here/*.whl -w "$dist/bundled" --strip \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude libgomp.so.1 ||
    die "auditwheel could not bundle the libraries; see the lines above."
  "$tools/wheel" unpack -d "$dist/unpacked" "$dist"/bundled/*.whl >&2
  licenses=$(echo "$dist"/unpacked/*/*.dist-info/licenses)
  while read -r package library; do
    [ -z "$(find "$dist/unpacked" -name "$library*")" ] ||
      cp "/usr/share/doc/$package/copyright" "$licenses/$package.txt"
  done <<'END'
libdnnl2 libdnnl
libhwy1 libhwy
ocl-icd-libopencl1 libOpenCL
END
  "$tools/wheel" pack -d "$dist" "$dist"/unpacked/* >&2
}

build_wheel() {
  require build
  say "building the wheel"
  export CC=${CC:-cc} CXX=${CXX:-c++}  # as in other builds, so that ccache finds the files
  rm -rf "$dist"/{here,bundled,unpacked,*.whl}
  .venv-torch/bin/python -m pip wheel -q --no-deps -w "$dist/here" \
    --config-settings=build-dir=build/wheel \
    --config-settings=cmake.define.TILEMOE_CUDA_ARCHS="${TILEMOE_CUDA_ARCHS:-80;90a;100f;120}" \
    --config-settings=cmake.define.TILEMOE_SM80_ON_HOPPER="${TILEMOE_SM80_ON_HOPPER:-ON}" "$@" . ||
    die "the wheel could not be built; see the lines above."
  bundle
  rm -r "$dist"/{here,bundled,unpacked}
  local wheel backends="the CPU and CUDA"
  wheel=$(echo "$dist"/*.whl)
  [ "${TILEMOE_CPU:-}" != OFF ] || backends="CUDA only"
  case $wheel in
  *+cpu-*) backends="the CPU only: no CUDA compiler (12.5 or newer) was found" ;;
  esac
  say "$wheel: for $backends"
}

require python
require_torch ""
require_wheel_tools
mkdir -p "$dist"
[ "$what" = wheel ] || build_sdist
[ "$what" = sdist ] || build_wheel "$@"
