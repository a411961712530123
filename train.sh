#!/usr/bin/env bash
# Sets this machine up, builds TileMoE's command line and trains a small Mixture-of-Experts language
# model on real text. ./train.sh --help says more.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
program=$root/build/release/apps/tilemoe/tilemoe

usage() {
  cat <<END
usage: ./train.sh [options of 'tilemoe train']

Trains a small Mixture-of-Experts language model on real text, from a fresh clone:

  1. installs the packages that are missing, as root; otherwise it prints the one command to run
  2. builds the command line, $program:
     3 to 7 minutes on two cores the first time, for the CPU alone if there is no GPU
  3. trains, 2 to 4 minutes on two cores, and prints a sample of what the model writes; your text
     will differ from README's, since it depends on the CPU

Options go to 'tilemoe train'. The first that you may want:

  --text FILE...   train on your own text (.txt, .gz) instead of an English dictionary
  --out DIR        where the run is kept
  --steps N        a longer or a shorter training

END
}

# Of compute capability 8.0 or newer, which the CUDA backend is for.
has_gpu() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -Eq '^([89]|1[0-9])\.'; }

case " $* " in
*" --help "* | *" -h "*)
  usage
  [ -x "$program" ] || { echo "All options: '$program train --help', once it is built." && exit; }
  exec "$program" train --help
  ;;
esac

require build train
cuda=OFF
if has_gpu; then
  require python
  require_nvcc
  cuda=ON
fi
build release tilemoe_cli -DTILEMOE_CUDA=$cuda -DTILEMOE_BUILD_TESTS=OFF -DTILEMOE_TORCH=OFF
say "training"
exec "$program" train "$@"
