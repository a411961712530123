#!/usr/bin/env bash
# Formats every C, C++ and CUDA source in place; with --check, lists the files that it would change.
# clang-format 14, whatever else is installed: versions disagree with each other.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

formatter=$(command -v clang-format-14) ||
  die "clang-format-14 is missing: apt-get install clang-format-14"
arguments=(-i)
[ "${1:-}" != --check ] || arguments=(--dry-run --Werror)
cd "$root"
git ls-files -z -- '*.h' '*.c' '*.cc' '*.cpp' '*.cu' '*.cuh' |
  xargs -0 -- "$formatter" "${arguments[@]}"
