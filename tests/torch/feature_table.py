"""The tables of docs/pytorch.md that say how a kind of layer goes with each feature: their rows, the
test of one, and layers with the inputs of each entry."""

import re
from pathlib import Path

import torch

import tilemoe
from checks import refused
from random_layers import E, K, T, normal

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
REFUSED = "refused: "  # begins what a table says of a feature that raises; the message follows


def check(use, says):
    """Call the test of a row, which must raise what the row says, if anything."""
    if says.startswith(REFUSED):
        refused(NotImplementedError, says.removeprefix(REFUSED), use)
    else:
        use()


def rows_of_page(heading, column):
    """-> {feature: what the table of this section, with this second column, says}."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    table = section.split(f"| feature | {column} |")[1]
    return dict(re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE))


def with_given_ids(tensors):
    """-> the tensors of `moe` with scores instead of logits, and the ids that they have."""
    scores, ids = tilemoe.top_k(tensors["logits_or_scores"].detach(), K)[:2]
    return {**tensors, "logits_or_scores": scores.requires_grad_()}, dict(ids=ids)


def of_pairs(tensors):
    """-> tensors of `moe_general`, and its pairs: two of each token, some of no expert."""
    tensors = {k: v for k, v in tensors.items() if k != "logits_or_scores"}
    tensors["scores"] = normal(2 * T, seed=3, dtype=torch.float32).requires_grad_()
    tokens = torch.arange(T).repeat_interleave(2)
    return tensors, dict(tokens=tokens, experts=torch.arange(2 * T) % (E + 1))


def of_rows(tensors):
    """-> tensors of `grouped_experts`, and its counts."""
    tensors = {k: v for k, v in tensors.items() if k != "logits_or_scores"}
    tensors["rows"] = tensors.pop("x")
    return tensors, dict(counts=torch.arange(E))


def with_ones(tensors):
    """-> the tensors with an addend that requires its gradient."""
    return {**tensors, "addend": torch.ones_like(tensors["x"]).requires_grad_()}


def check_H_is_kept(function, tensors, leaves, overwrite_H):
    """A compiled layer may be differentiated twice, whatever overwrite_H."""
    loss = function(**tensors, K=K, overwrite_H=overwrite_H).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for again, gradient in zip(torch.autograd.grad(loss, leaves), first, strict=True):
        assert torch.equal(again, gradient)


def check_walked_twice(O, leaf):
    first = torch.autograd.grad(O.sum(), leaf, retain_graph=True)
    second = torch.autograd.grad(O.sum(), leaf)
    assert torch.equal(*first, *second) and first[0].any()


def take_second_gradients(O, leaf):
    (gradient,) = torch.autograd.grad(O.sum(), leaf, create_graph=True)
    gradient.sum().backward()
