"""The command of docs/distributed.md, unchanged: torchtitan's trainer with TileMoE's experts and
with its own, from the same seed, on this CPU (torchtitan_on_cpu.py) and without a network.

torchtitan's config names a tokenizer and a text of its repository by relative paths; the test makes
both, in the folder that the command runs in.
"""

import json
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import torchtitan_stand_ins

if not torchtitan_stand_ins.HAS_HYBRIDEP:
    pytest.skip("torchtitan's models require a newer torch", allow_module_level=True)

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
OVERRIDE = "--override.imports tilemoe.torchtitan.experts"
STEPS = 3
SHORT = (
    f" --training.steps {STEPS} --training.seq-len 64 --training.local-batch-size 2"
    " --lr-scheduler.warmup-steps 0 --debug.seed 0"
)
# Relative. Another order of rounding to bfloat16 gives 3e-4 in the losses, 1e-4 in the first norm of
# the gradients and 2e-3 in the later ones; outputs that are 5 % too large, 5e-3 in the first norm and
# 1e-2 in the later ones, and exchanged w1 and w3 more.
LOSS_LIMIT, FIRST_NORM_LIMIT, NORM_LIMIT = 1e-3, 1e-3, 5e-3


def documented():
    """The page's command."""
    page = (ROOT / "docs" / "distributed.md").read_text().split("\n## torchtitan\n")[1].split("\n## ")[0]
    (command,) = re.findall(r"^```sh\n(torchrun (?:.|\n)*?)\n```$", page, re.MULTILINE)
    return command


def write_assets(folder):
    """A tokenizer of bytes, and text of few words, whose loss falls fast."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<|begin|>", "<|end|>"]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    place = folder / "tests" / "assets" / "tokenizer"
    place.mkdir(parents=True)
    tokenizer.save(str(place / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token"), special))
    (place / "tokenizer_config.json").write_text(json.dumps(names))

    words = random.Random(0)
    place = folder / "tests" / "assets" / "c4_test"
    place.mkdir()
    texts = [" ".join(words.choices("the moon and a river shine by night".split(), k=60)) for _ in range(50)]
    (place / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def environment(folder):
    """With a `torchrun` of this Python, of which this environment need not have the script."""
    script = folder / "bin" / "torchrun"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    script.chmod(0o755)
    return os.environ | {
        "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(HERE / "torchtitan_cpu"), *sys.path]),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # torchrun's own options: a free port, and no look-up of this machine's name.
        "PET_STANDALONE": "1",
        "PET_LOCAL_ADDR": "localhost",
    }


def trained(commands, folder):
    """Run the commands at once -> by name (losses, norms of the gradients, output)."""
    write_assets(folder)
    env = environment(folder)
    runs = {
        name: subprocess.Popen(
            ["bash", "-c", f"{command} --dump-folder outputs-{name}"],
            cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, command in commands.items()
    }  # fmt: skip
    try:
        outputs = {name: run.communicate(timeout=600)[0] for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.terminate()  # torchrun ends its processes
            run.communicate()
    found = {}
    for name, output in outputs.items():
        assert runs[name].returncode == 0, f"{name}: {output[-4000:]}"
        output = re.sub(r"\x1b\[[0-9;]*m", "", output)
        steps = re.findall(r"step: +\d+ +loss: +(\S+) +grad_norm: +(\S+)", output)
        assert len(steps) == STEPS, output
        found[name] = (*([float(value) for value in values] for values in zip(*steps)), output)
    return found


def test_other_places_have_the_same_command():
    import tilemoe.torchtitan

    words = lambda text: " ".join(text.replace("\\\n", " ").split())
    assert words(documented()) in words(tilemoe.torchtitan.__doc__)
    assert OVERRIDE in (ROOT / "README.md").read_text()


def test_the_documented_command_trains_as_torchtitan_does(tmp_path):
    command = documented()
    assert command.endswith(OVERRIDE)
    without, routed = command.removesuffix(OVERRIDE), command.replace(".experts", ".routed_experts")
    commands = {"own": without + SHORT, "experts": command + SHORT, "routed": routed + SHORT}
    runs = trained(commands, tmp_path)
    own_losses, own_norms, output = runs["own"]
    assert "[Override]" not in output
    assert own_losses[-1] < own_losses[0] - 1, own_losses
    for name in ("experts", "routed"):
        losses, norms, output = runs[name]
        assert output.count("[Override] tilemoe.torchtitan.") == 1, output
        assert losses == pytest.approx(own_losses, rel=LOSS_LIMIT), name
        assert norms[0] == pytest.approx(own_norms[0], rel=FIRST_NORM_LIMIT), name
        assert norms == pytest.approx(own_norms, rel=NORM_LIMIT), name
