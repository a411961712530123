#!/usr/bin/env bash
# Builds libFuzzer's targets (preset `fuzz`) and runs each for SECONDS (300), one after the other.
# Inputs that they find stay in build/fuzz/corpus; an input that fails is kept in build/fuzz and
# named, and the script fails.   scripts/fuzz.sh [SECONDS [TARGET...]]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
seconds=${1:-300}
targets=("${@:2}")
[ ${#targets[@]} -gt 0 ] || targets=(checkpoint log safetensors c_interface)

command -v clang++ >/dev/null || die "clang++ is missing: apt-get install clang libomp-dev"
build fuzz
folder=$root/build/fuzz
"$folder/tests/train/fuzz_seeds" "$folder/seeds"
for target in "${targets[@]}"; do
  say "fuzzing $target for $seconds s"
  program=$folder/tests/train/fuzz_$target
  options=("-dict=$root/tests/train/fuzz/files.dict")
  if [ "$target" = c_interface ]; then
    program=$folder/tests/fuzz_c_interface
    options=(-len_control=0)
  fi
  mkdir -p "$folder/corpus/$target"
  "$program" "${options[@]}" -max_total_time="$seconds" -timeout=60 -print_final_stats=1 \
    -verbosity=0 -print_funcs=0 -artifact_prefix="$folder/$target-" \
    "$folder/corpus/$target" "$folder/seeds/$target"
done
