"""Every experts class of the installed transformers, built small, and what its tests compare."""

import ast
import copy
import functools
import importlib
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

import tilemoe
from comparison import assert_close
from tilemoe.integrations import transformers_norm

TABLES = Path(__file__).with_name("transformers_tables.md")
PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"  # has the names of the tables
OF_CLASSES = "classes of " + transformers.__version__.rpartition(".")[0]
T, d, n, E, K = 29, 24, 16, 6, 3

# By the name under which a configuration keeps them.
SIZES = {
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "moe_num_experts": E,
    "hidden_size": d,
    "moe_hidden_size": d,
    "intermediate_size": n,
    "moe_intermediate_size": n,
}


def _is_decorated(node):
    return isinstance(node, ast.ClassDef) and any(
        "use_experts_implementation" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def decorated_classes():
    """[(model's folder, class)]: all that carry @use_experts_implementation in the source."""
    found = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text()
        if "use_experts_implementation" not in source:
            continue
        names = [node.name for node in ast.parse(source).body if _is_decorated(node)]
        folder = path.parent.name
        module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        found += [(folder, getattr(module, name)) for name in names]
    return found


def between(page, name):
    """-> what is before a table, the table, and what is after it."""
    start, end = f"<!-- {name}: written by tests/torch/transformers_test.py -->\n", "\n<!-- end -->"
    before, _, rest = page.partition(start)
    table, _, after = rest.partition(end)
    return before + start, table, end + after


def refused_classes():
    """The classes that the table of the installed version says are refused."""
    return {name for name, outcome in classes_of_table(OF_CLASSES).items() if is_refused(outcome)}


def is_refused(outcome):
    return outcome.startswith("refused")


def classes_of_table(name):
    """-> {class: outcome} of a table of classes."""
    _, table, _ = between(TABLES.read_text(), name)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {cls: outcome for _, _, outcome, classes in rows for cls in classes.split(", ")}


def list_of_classes():
    """The classes that are not refused, by the version that has them, as docs/pytorch.md lists them."""
    older, newer = (
        {name for name, outcome in classes_of_table(table).items() if not is_refused(outcome)}
        for table in ("classes of 5.17", "classes of 5.24")
    )
    of_both, new = (", ".join(sorted(names, key=str.lower)) for names in (older & newer, newer - older))
    assert not older - newer
    return f"- 5.17 and 5.24: {of_both}.\n- 5.24 only: {new}."


def list_of_activations():
    """The activations of the table, by what is computed of them, as docs/pytorch.md lists them."""
    _, table, _ = between(TABLES.read_text(), "activations")
    found = {}
    for name, *outcomes in (line.strip("| ").split(" | ") for line in table.splitlines()[2:]):
        found.setdefault(tuple(not is_refused(outcome) for outcome in outcomes), []).append(f"`{name}`")
    kinds = {
        (True, True): "With a gate and without",
        (True, False): "With a gate only",
        (False, True): "Without a gate only",
        (False, False): "Refused",
    }
    return "\n".join(f"- {title}: {', '.join(found[kind])}." for kind, title in kinds.items())


class SmallConfig:
    """A model's default configuration, but for the sizes."""

    def __init__(self, config):
        vars(self).update({name: size for name, size in SIZES.items() if hasattr(config, name)})
        self.default = config

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.default, name)


def build(cls):
    """A small module of `cls` from the configuration that its own model has by default."""
    for config_class in vars(importlib.import_module(cls.__module__)).values():
        if not (isinstance(config_class, type) and issubclass(config_class, PreTrainedConfig)):
            continue
        if config_class is PreTrainedConfig:
            continue
        try:
            return cls(SmallConfig(config_class()))
        except AttributeError:
            pass  # the configuration of another part of the model
    raise AssertionError(f"no configuration in {cls.__module__} builds {cls.__name__}")


def fill(module, seed=0, meets_clamp=True):
    """Unit-scale weights; where a gate has a clamp, so large that a good part of H meets it."""
    g = torch.Generator().manual_seed(seed)
    limit = getattr(module, "swiglu_limit", getattr(module, "limit", 1.0)) if meets_clamp else 1.0
    for name, p in module.named_parameters():
        if p.ndim < 3:  # a bias
            scale = 0.5
        else:
            fan_in = p.shape[1] if module.is_transposed else p.shape[2]
            scale = fan_in**-0.5
        if name.startswith(("gate_up", "up")):
            scale *= limit
        p.data = torch.randn(p.shape, generator=g, device="cpu") * scale
    return module


def problem(seed=1, sentinels=False):
    """x (T, d), ids (T, K), scores (T, K), dO (T, d). The last expert is chosen by nobody.

    Sentinels: a third of the ids, and all of the first token's, are E: experts of other ranks.
    Their scores are as any others, so that one which is computed after all shows.
    """
    g = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.rand, generator=g, device="cpu")
    x, dO = torch.randn(2, T, d, generator=g, device="cpu")
    ids = rand(T, E - 1).argsort(-1)[:, :K]
    scores = rand(T, K) + 0.1
    if sentinels:
        elsewhere = rand(T, K) < 1 / 3
        elsewhere[0] = True
        ids = ids.masked_fill(elsewhere, E)
    return x, ids, scores, dO


def run(module, x, ids, scores, dO):
    """-> {name: tensor}: the output and every gradient that is not None."""
    x, scores = (t.detach().clone().requires_grad_() for t in (x, scores))
    module.zero_grad()
    out = module(x, ids, scores)
    out.backward(dO.to(out.dtype))
    gradients = {f"d {name}": p.grad for name, p in module.named_parameters()}
    return {"output": out, "d hidden_states": x.grad, "d top_k_weights": scores.grad} | gradients


def run_eager(module, x, ids, scores, dO):
    """The same by the class's own loop, in float64. It cannot take sentinels: they become pairs of
    expert 0 with weight 0, whose gradient is not required."""
    module = copy.deepcopy(module).double()
    module.config = copy.copy(module.config)
    module.config._experts_implementation = "eager"
    here = ids < E
    x, scores = (t.detach().double().requires_grad_() for t in (x, scores))
    out = module(x, ids.where(here, 0), scores * here)
    out.backward(dO.to(out.dtype))
    gradients = {f"d {name}": p.grad for name, p in module.named_parameters()}
    return {"output": out, "d hidden_states": x.grad, "d top_k_weights": scores.grad} | gradients


def relative_error(got, want):
    return ((got.double() - want).norm() / want.double().norm()).item()


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        # A token's K gradients are a short row in which sums of n terms cancel: all as one row.
        assert got[name] is not None, f"{name} is missing"
        whole = (1, -1) if name == "d top_k_weights" else want[name].shape
        assert_close(got[name].reshape(whole), want[name].reshape(whole), name)


def slips(real, module):
    """{name: what tilemoe.moe would be if it had this fault}. Each has to be noticed."""
    halves = lambda t: t.roll(n, dims=1)
    columns = lambda t: t.unflatten(1, (n, 2)).flip(2).flatten(1, 2)
    swap = halves if module.is_concatenated else columns
    found = {
        "zeros": lambda x, s, W1, W2, **k: real(x, s, W1, W2, **k) * 0,
        "an expert is dropped": lambda x, s, W1, W2, *, ids, **k: real(
            x, s, W1, W2, ids=ids.masked_fill(ids == 1, -1), **k
        ),
        "scores are ignored": lambda x, s, W1, W2, **k: real(x, s * 0 + 1, W1, W2, **k),
        "no gradient of x": lambda x, s, W1, W2, **k: real(x.detach(), s, W1, W2, **k),
        "no gradient of the scores": lambda x, s, W1, W2, **k: real(x, s.detach(), W1, W2, **k),
        "no gradient of W1": lambda x, s, W1, W2, **k: real(x, s, W1.detach(), W2, **k),
        "no gradient of W2": lambda x, s, W1, W2, **k: real(x, s, W1, W2.detach(), **k),
        "another activation": lambda x, s, W1, W2, **k: real(
            x, s, W1, W2, **(k | _another_activation(k))
        ),
    }
    if module.has_gate:
        found["gate and up are swapped"] = lambda x, s, W1, W2, *, b1, **k: real(
            x, s, swap(W1), W2, b1=b1 if b1 is None else swap(b1), **k
        )
    if module.has_bias:
        for name in ("b1", "b2"):
            found[f"{name} is ignored"] = lambda x, s, W1, W2, name=name, **k: real(
                x, s, W1, W2, **(k | {name: None})
            )
            found[f"no gradient of {name}"] = lambda x, s, W1, W2, name=name, **k: real(
                x, s, W1, W2, **(k | {name: k[name].detach()})
            )
    return found


def norm_slips():
    """[(fault, module of tilemoe, name, what it would be with this fault)] of experts with a norm of
    each expert's output."""
    gemms, of_norm = tilemoe.gemms, transformers_norm
    route_ids, gathered_mm, total = gemms.route_ids, gemms.gathered_mm, gemms.weighted_sum
    of_module = of_norm.norm_of
    ones = lambda routing: routing._replace(scores=torch.ones_like(routing.scores))
    first = lambda x, W, routing, **k: gathered_mm(x, W.detach(), routing, **k)
    return [
        ("the norm is ignored", of_norm, "norm_of", lambda m: of_module(m) and torch.nn.Identity()),
        ("scores are ignored", gemms, "weighted_sum", lambda rows, r: total(rows, ones(r))),
        ("an expert is dropped", gemms, "route_ids",
         lambda ids, *a: route_ids(ids.masked_fill(ids == 1, -1), *a)),
        ("no gradient of the weights", gemms, "gathered_mm", first),
        ("no gradient of x", gemms, "gathered_mm",
         lambda x, *a, **k: gathered_mm(x.detach(), *a, **k)),
    ]  # fmt: skip


def _another_activation(arguments):
    if arguments["alpha"] or arguments["clamp"]:
        return {"clamp": 0.0, "alpha": 0.0, "up_shift": 0.0}
    others = {"swiglu": "geglu", "relu_squared": "relu"}
    return {"activation": others.get(arguments["activation"], "swiglu")}
