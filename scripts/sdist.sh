#!/usr/bin/env bash
# Builds the source distribution of the PyTorch package: build/sdist/tilemoe-*.tar.gz. With --try it
# then builds a wheel for the CPU from it, in an empty folder without git, and trains a layer with
# what is installed of that (minutes).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

require_torch ""
require_wheel_tools
say "building the source distribution"
rm -rf build/sdist
.venv-wheel/bin/python -m build --sdist --outdir build/sdist . >&2 ||
  die "the source distribution could not be built; the lines above say why."
[ "${1:-}" = --try ] || exit 0

say "building a wheel from it"
require build
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$root/.venv-torch/bin/python
tar -xzf build/sdist/*.tar.gz -C "$folder"
cd "$folder"
{ TILEMOE_CUDA=OFF "$python" -m pip wheel -q --no-deps -w . ./tilemoe-*/ &&
  "$python" -m pip install -q --no-deps --target installed ./*.whl; } >&2 ||
  die "the wheel could not be built; the lines above say why."
PYTHONPATH=$folder/installed "$python" - <<'END' || die "the wheel does not work."
import pathlib

import tilemoe
import torch

tilemoe.show_config()
assert pathlib.Path(tilemoe.__file__).is_relative_to(pathlib.Path.cwd()), tilemoe.__file__
torch.manual_seed(0)
layer = tilemoe.MoE(d=64, n=32, E=8, K=2, return_aux=True)
optimizer = torch.optim.SGD(layer.parameters(), lr=1)
x, losses = torch.randn(128, 64), []
for _ in range(10):
    loss = (layer(x)[0] - x).square().mean()
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert losses[-1] < losses[0] - 0.01, losses
END
say "build/sdist: a wheel built from it works"
