#!/usr/bin/env bash
# Packs the programs of a build that run on a GPU, stripped, and the shared libraries that they need,
# for a machine without a compiler:
#
#   scripts/gpu/pack.sh build/ci gpu.tar.xz     there: tar -xJf gpu.tar.xz -C DIR, and then
#   scripts/gpu/run.py --programs DIR
#   scripts/gpu/pack.sh build/ci gpu.tar.xz tilemoe tilemoe_kernels     only these, for measure.py
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
build=$1 archive=$2
shift 2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/bin" "$place/lib"

find "$build" -type f -perm -u+x \( -name 'cuda_*_test' -o -name 'tilemoe_cuda_*' -o -name 'example_*_cuda' \
  -o -name tilemoe_kernels -o -path "*/apps/tilemoe/tilemoe" \) \
  -exec cp -t "$place/bin" {} +
for program in "$place"/bin/*; do # without names, all
  [ $# = 0 ] || [[ " $* " == *" ${program##*/} "* ]] || rm "$program"
done
[ -e "$place/bin/tilemoe" ] || { echo "error: $build has no tilemoe; build it first" >&2; exit 1; }
strip "$place"/bin/*
# The system's own libraries are everywhere; these are not.
ldd "$place"/bin/* | awk '$2 == "=>" { print $3 }' | sort -u |
  { grep -Ev '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so' || true; } |
  xargs -r cp -L -t "$place/lib"
strip --strip-unneeded "$place"/lib/*
# Each program has all kernels: a dictionary larger than a program finds them again in the next.
tar -C "$place" -c bin lib | xz -T1 --lzma2=preset=4,dict=256MiB >"$archive"
ls -l "$archive"
