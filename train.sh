#!/usr/bin/env bash
# Sets this machine up, builds TileMoE's command line and trains a small Mixture-of-Experts language
# model on real text. ./train.sh --help lists the options.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
program=$root/build/release/apps/tilemoe/tilemoe

usage() {
  cat <<END
usage: ./train.sh [options of 'tilemoe train']

Trains a small Mixture-of-Experts language model on real text, from a fresh clone:

  1. installs missing packages as root, or prints the command that installs them
  2. builds the command line, $program:
     3 to 7 minutes on two cores the first time; with CUDA only if the machine has a GPU
  3. trains, 2 to 4 minutes on two cores, and prints a sample of the model's text, which depends
     on the CPU

Options are passed to 'tilemoe train', for instance:

  --text FILE...   train on your own text (.txt, .gz) instead of an English dictionary
  --out DIR        folder of the run
  --steps N        number of training steps

END
}

# Whether the machine has a GPU of compute capability 8.0 or newer, which the CUDA backend requires.
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
