#!/usr/bin/env bash
# Fetches the wheels that the package's tests need on a GPU machine and that it may lack, as
# tests/torch/requirements*.txt pin them, for `--packages DIR` there:
#
#   scripts/gpu/packages.sh DIR
set -euo pipefail
[ $# = 1 ] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
names='expecttest|docstring_parser|einops|spmd_types|torchtitan|tyro|accelerate'
grep -hE "^($names)==" "$root"/tests/torch/requirements{,-tests}.txt |
  xargs python3 -m pip download -q --no-deps --only-binary :all: --dest "$1"
ls "$1"
