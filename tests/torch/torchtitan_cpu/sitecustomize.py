"""Runs torchtitan's trainer on a CPU. Python imports this file when it starts, if this folder is in
PYTHONPATH, so that the trainer's command line stays as it is. Only the processes that torchrun
starts are changed: see torchtitan_on_cpu.py. Qwen3's debug model becomes smaller.
"""

import os

if "LOCAL_RANK" in os.environ:
    import torchtitan_on_cpu
    from torchtitan.models.qwen3 import qwen3_configs

    torchtitan_on_cpu.make_small(qwen3_configs, "debugmodel_moe")
