"""Train one MoE layer to imitate a fixed one, on the CPU in a few seconds.

    python examples/pytorch_module.py

The example has token rounding with a seed and a step, the losses, a selection bias that counts
update, and a state dict that another library reads.
"""

import torch

import tilemoe
from tilemoe.state_dict import from_torchtitan, to_torchtitan


def train(student, teacher, steps, router_step):
    """Train the student, and return the task's loss at each step."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        x = torch.randn(256, student.d)
        with torch.no_grad():
            target = teacher(x)
        out, aux = student(x, seed=0, offset=step)  # for stochastic rounding
        task = (out - target).square().mean()
        optimizer.zero_grad()
        (task + aux.loss).backward()
        optimizer.step()
        router_step(aux)
        losses.append(task.item())
    return losses


def main():
    torch.manual_seed(0)
    d, n, E, K = 64, 32, 8, 2
    teacher = tilemoe.MoE(d, n, E, K)

    rounded = tilemoe.MoE(
        d, n, E, K, return_aux=True, rounding="stochastic", m=16, balance_coefficient=1e-3
    )
    losses = train(rounded, teacher, 100, router_step=lambda aux: None)
    print(f"token rounding:  loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    biased = tilemoe.MoE(
        d, n, E, K, return_aux=True, scoring="sigmoid_renormalized", selection_bias=True
    )
    keep_balance = lambda aux: biased.update_selection_bias(aux.expert_counts, rate=1e-3)
    losses = train(biased, teacher, 100, router_step=keep_balance)
    print(f"selection bias:  loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    titan = to_torchtitan(biased.state_dict())
    print("for torchtitan: ", ", ".join(titan))
    biased.load_state_dict(from_torchtitan(titan))


if __name__ == "__main__":
    main()
