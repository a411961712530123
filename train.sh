#!/usr/bin/env bash
# Sets this machine up, builds TileMoE and trains a small Mixture-of-Experts language model on real
# text, on the CPU, in a few minutes. Options go to `tilemoe train`; ./train.sh --help lists them.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"

program=$root/build/release/apps/tilemoe/tilemoe
groups=(build train)
case " $* " in
*" --help "* | *" -h "*)
  [ ! -x "$program" ] || exec "$program" train "$@"
  groups=(build)
  ;;
esac
require "${groups[@]}"
build release tilemoe_cli -DTILEMOE_BUILD_TESTS=OFF  # test.sh turns them on again
say "training"
exec "$program" train "$@"
