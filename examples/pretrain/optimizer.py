"""Define AdamW on the shards, and the learning rate of a step."""

import math

import torch
from torch.optim.adamw import adamw


class AdamW(torch.optim.AdamW):
    """Fused AdamW of torch, on the shards themselves.

    Splitting DTensors costs the host some milliseconds per step, in which the device waits. State
    and checkpoints are torch's. If the tensor `skip` of step(), () float32, is 1, nothing changes.
    The device decides, so the host need not wait for the loss.
    """

    @torch.no_grad()
    def step(self, closure=None, skip=None):
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    count = torch.zeros((), device=p.device)  # number of updates
                    moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    self.state[p] = {"step": count, **moments}
            states = [self.state[p] for p in parameters]
            adamw(
                [p.to_local() for p in parameters],
                [p.grad.to_local() for p in parameters],
                [state["exp_avg"].to_local() for state in states],
                [state["exp_avg_sq"].to_local() for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=skip,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def optimizer_of(model, args):
    """Return the optimizer, without weight decay on the norms' weights."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    options = {"lr": args.learning_rate, "betas": (0.9, 0.95), "weight_decay": args.weight_decay}
    return AdamW(groups, **options)


def learning_rate(step, args):
    """Return the learning rate: linear warm-up from 0, then half a cosine down to a tenth."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
