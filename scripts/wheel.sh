#!/usr/bin/env bash
# Builds the PyTorch package as a wheel for other machines: build/dist/tilemoe-*.whl, or in the folder
# TILEMOE_DIST. It brings the distribution's oneDNN and Highway, and takes torch's own OpenMP runtime,
# which torch has loaded before. Options go to `pip wheel`. The result has the CUDA library where
# there is a CUDA compiler, with kernels for TILEMOE_CUDA_ARCHS of the environment and, where
# TILEMOE_SM80_ON_HOPPER is ON, the sm80 kit for Hopper too: without them, for every GPU. CI and the
# tests ask for less, since this takes long.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
dist=${TILEMOE_DIST:-build/dist}

require build python
require_torch ""
require_wheel_tools
say "building the wheel"
export CC=${CC:-cc} CXX=${CXX:-c++}  # as CMake has them elsewhere, so that ccache knows the files
rm -rf "$dist"
mkdir -p "$dist"
.venv-torch/bin/python -m pip wheel -q --no-deps -w "$dist/here" \
  --config-settings=build-dir=build/wheel \
  --config-settings=cmake.define.TILEMOE_CUDA_ARCHS="${TILEMOE_CUDA_ARCHS:-80;90a;100f;120}" \
  --config-settings=cmake.define.TILEMOE_SM80_ON_HOPPER="${TILEMOE_SM80_ON_HOPPER:-ON}" "$@" . ||
  die "the wheel could not be built; the lines above say why."

say "bundling what a clean machine lacks"
tools=$root/.venv-wheel/bin
PATH=$tools:$PATH auditwheel repair "$dist"/here/*.whl -w "$dist/bundled" --strip \
  --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude libgomp.so.1 ||
  die "auditwheel could not bundle the libraries; the lines above say why."
"$tools/wheel" unpack -d "$dist/unpacked" "$dist"/bundled/*.whl >&2
licenses=$(echo "$dist"/unpacked/*/*.dist-info/licenses)
for package in libdnnl2 libhwy1 ocl-icd-libopencl1; do
  cp "/usr/share/doc/$package/copyright" "$licenses/$package.txt"
done
"$tools/wheel" pack -d "$dist" "$dist"/unpacked/* >&2
rm -r "$dist"/{here,bundled,unpacked}
wheel=$(echo "$dist"/*.whl)
case $wheel in
*+cpu-*) say "$wheel: for the CPU alone, since there is no CUDA compiler (12.5 or newer)" ;;
*) say "$wheel: for the CPU and for CUDA" ;;
esac
