"""Load the model of a run for one process without FSDP: only its weights, no optimizer."""

import json
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoints
import tokens
from configs import Config, Refusal, configuration
from model import Transformer
from run import IDENTITY


class Trained(NamedTuple):
    model: Transformer  # in evaluation mode
    config: Config
    name: str  # name of the configuration
    step: int
    tokens: tokens.ByteTokens | tokens.TokenizerTokens
    checkpoint: Path


def find(path):
    """Return the run's folder and the (last) checkpoint of a folder or checkpoint."""
    path = Path(path)
    if (path / ".metadata").exists():
        return path.parents[1], path
    folders = checkpoints.finished(path / "checkpoints")
    if not folders:
        raise Refusal(
            f"no checkpoint found in {path}; pass --output of train.py, or a step-N in it"
        )
    return path, folders[-1]


def read(state, checkpoint):
    """Read into the tensors of a state, in this process alone."""
    with warnings.catch_warnings():
        # torch also warns of the missing process group with no_dist=True.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        checkpoints.read(state, checkpoint, alone=True)


def load(path, device="cpu", dtype=torch.float32):
    """Load a run's folder, or one of its checkpoints, with parameters in `dtype`."""
    run, checkpoint = find(path)
    text = tokens.of_run(run)
    state = {"progress": {"step": 0, "sequence": 0, "of": ""}}
    read(state, checkpoint)
    of = json.loads(state["progress"]["of"])
    if isinstance(of, list):
        of = dict(zip(IDENTITY, of))  # by an earlier version
    c = configuration(of["config"], of["layers"])
    with torch.device("meta"):
        model = Transformer(c)
    model.to(dtype).to_empty(device=device)
    read({"model": model.state_dict()}, checkpoint)
    step = state["progress"]["step"]
    return Trained(model.eval(), c, of["config"], step, text, checkpoint)
