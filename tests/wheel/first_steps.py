"""A user's first steps with an installed wheel. Run by scripts/test_wheel.sh in an environment that
has the package, no torch and no compiler: `python - TORCH < first_steps.py`, with the folder that
has torch."""

import shutil
import sys

assert [name for name in ("cc", "c++", "gcc", "g++", "clang", "nvcc") if shutil.which(name)] == []
import tilemoe
from tilemoe import options

assert options.Options().column_blocks == 1
try:
    tilemoe.MoE
except ImportError as error:
    assert "pip install 'tilemoe[torch]'" in str(error), error
else:
    sys.exit(f"{tilemoe.__file__} has MoE without torch")

# The same program with torch.
for name in [name for name in sys.modules if name.split(".")[0] == "tilemoe"]:
    del sys.modules[name]
sys.path.append(sys.argv[1])
import tilemoe
import torch

assert tilemoe.__file__.startswith(sys.prefix + "/"), tilemoe.__file__
tilemoe.show_config()
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
