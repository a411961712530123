#!/usr/bin/env bash
# Sets this machine up, builds TileMoE and trains a small Mixture-of-Experts language model on real
# text, on the CPU, in a few minutes. Options go to `tilemoe train`; ./train.sh --help lists them.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"

require build train
build release
say "training"
exec "$root/build/release/apps/tilemoe/tilemoe" train "$@"
