"""Every experts class of transformers: TileMoE computes what `eager` does, or says why not.

Run as a script it writes the tables of the installed version into transformers_tables.md and their
names into docs/pytorch.md; the tests compare them.
"""

import types

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from checks import python, refused
import tilemoe
import tilemoe.transformers
from tilemoe.integrations.transformers_norm import norm_of
from tilemoe.integrations import transformers_forms
from comparison import assert_close
from transformers_support import (
    E, OF_CLASSES, PAGE, TABLES, assert_same, between, build, decorated_classes, fill,
    list_of_activations, list_of_classes, norm_slips, problem, refused_classes, relative_error, run,
    run_eager, slips,
)  # fmt: skip

CLASSES = decorated_classes()
REFUSED_CLASSES = refused_classes()
each_class = pytest.mark.parametrize(
    "cls",
    [c for _, c in CLASSES if c.__name__ not in REFUSED_CLASSES],
    ids=lambda cls: cls.__name__,
)


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()


def small(cls, implementation="tilemoe"):
    module = fill(build(cls))
    module.config._experts_implementation = implementation
    return module


# ---------------------------------------------------------------- the table


def weights_words(module):
    words = ["gated" if module.has_gate else "not gated"]
    if module.has_gate:
        words.append("concatenated" if module.is_concatenated else "interleaved")
    words += ["transposed"] * module.is_transposed + ["biased"] * module.has_bias
    words += ["a norm of each expert's output"] * (norm_of(module) is not None)
    return ", ".join(words)


def form_words(form):
    numbers = {k: v for k, v in form._asdict().items() if isinstance(v, float) and v}
    return " ".join([form.activation, *(f"{k}={v:g}" for k, v in numbers.items())])


def outcome(module):
    """How the class fares: what is computed, or the refusal's words."""
    module.config._experts_implementation = "tilemoe"
    try:
        form = tilemoe.transformers.prepare(module)[""]
    except NotImplementedError as refusal:
        return "", f"refused: {str(refusal).partition(': ')[2]}"
    for sentinels in (False, True):
        data = problem(sentinels=sentinels)
        assert_same(run(module, *data), run_eager(module, *data))
    return form_words(form), "same as eager, sentinel ids too"


def class_table():
    """A row for all classes that have the same weights and fare alike."""
    alike = {}
    for _, cls in CLASSES:
        module = small(cls)
        gate = "" if cls._apply_gate.__qualname__ == "_default_apply_gate" else " (its own gate)"
        computes, result = outcome(module)
        row = weights_words(module), computes + gate * bool(computes), result
        alike.setdefault(row, []).append(cls.__name__)
    lines = ["| weights | activation | outcome | classes |", "|---|---|---|---|"]
    for row, names in sorted(alike.items(), key=lambda item: (-len(item[1]), item)):
        lines.append(f"| {' | '.join(row)} | {', '.join(names)} |")
    return "\n".join(lines)


def activation_table():
    """Every name that a configuration may give as its activation, with a gate and without."""
    lines = ["| activation | gated | not gated |", "|---|---|---|"]
    for name in sorted(ACT2FN):
        cells = []
        for cls, attribute in (
            (MixtralExperts, "hidden_act"),
            (NemotronHExperts, "mlp_hidden_act"),
        ):
            config = build(cls).config
            setattr(config, attribute, name)
            module = fill(cls(config))
            computes, result = outcome(module)
            cells.append(computes or result.partition(":")[0])
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def new_class_table():
    """A row for each class of the installed version that 5.17 lacks."""
    _, oldest, _ = between(TABLES.read_text(), "classes of 5.17")
    lines = ["| class | weights | activation | outcome |", "|---|---|---|---|"]
    for _, cls in sorted(CLASSES, key=lambda found: found[1].__name__.lower()):
        if cls.__name__ in oldest:
            continue
        module = small(cls)
        lines.append(f"| {cls.__name__} | {' | '.join((weights_words(module), *outcome(module)))} |")
    return "\n".join(lines)


WRITTEN = {OF_CLASSES: class_table, "activations": activation_table}
NEW = OF_CLASSES.replace("classes of", "new in")
if OF_CLASSES != "classes of 5.17":
    WRITTEN[NEW] = new_class_table
LISTS = {"classes": list_of_classes, "activations": list_of_activations}  # of docs/pytorch.md


@pytest.mark.parametrize("name", WRITTEN)
def test_the_recorded_table_still_holds(name):
    _, committed, _ = between(TABLES.read_text(), name)
    table = WRITTEN[name]()
    print(table)
    assert table == committed


@pytest.mark.parametrize("name", LISTS)
def test_the_page_lists_the_names_of_the_tables(name):
    _, committed, _ = between(PAGE.read_text(), name)
    assert committed == LISTS[name]()


def test_the_table_has_every_kind():
    _, table, _ = between(TABLES.read_text(), OF_CLASSES)
    rows = [line for line in table.splitlines()[2:]]
    assert sum(row.count(", ") + 1 for row in (row.split("|")[4] for row in rows)) == len(CLASSES)
    assert len(CLASSES) >= 55
    for kind in (
        "transposed", "interleaved", "biased", "not gated", "its own gate", "sentinel ids",
    ):  # fmt: skip
        assert any(kind in row for row in rows), kind
    assert any("gated, concatenated |" in row for row in rows)


# ---------------------------------------------------------------- the comparison can fail


@each_class
def test_every_slip_is_noticed(cls, monkeypatch):
    module = small(cls)
    data = problem()
    want = run_eager(module, *data)
    if norm_of(module) is None:
        made = slips(tilemoe.moe, module).items()
        planted = [(slip, tilemoe.functional, "moe", function) for slip, function in made]
    else:
        planted = norm_slips()
    for slip, place, name, function in planted:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, function)
            got = run(module, *data)
        with pytest.raises(AssertionError):
            assert_same(got, want)
            print(f"{cls.__name__}: nobody noticed that {slip}")


@each_class
def test_sentinel_ids_give_zeros_and_no_gradient(cls, monkeypatch):
    module = small(cls)
    x, ids, scores, dO = problem(sentinels=True)
    got = run(module, x, ids, scores, dO)
    assert (got["output"][0] == 0).all() and (got["d hidden_states"][0] == 0).all()
    assert (got["d top_k_weights"][ids == E] == 0).all()
    assert (got["d top_k_weights"][ids < E] != 0).all()
    # A sentinel's token is not read: even NaN stays where it is.
    x[0] = torch.nan
    assert all(
        torch.equal(a, b) for a, b in zip(run(module, x, ids, scores, dO).values(), got.values())
    )
    # Taking the last expert instead is noticed.
    real, route_ids = tilemoe.moe, tilemoe.gemms.route_ids
    last = lambda *a, ids, **k: real(*a, ids=ids.clamp(0, E - 1), **k)
    monkeypatch.setattr(tilemoe.functional, "moe", last)
    route_last = lambda ids, *a: route_ids(ids.clamp(0, E - 1), *a)
    monkeypatch.setattr(tilemoe.gemms, "route_ids", route_last)  # experts with a norm
    with pytest.raises(AssertionError):
        assert_same(
            run(module, *problem(sentinels=True)), run_eager(module, *problem(sentinels=True))
        )


def test_as_grouped_mm_does_with_sentinel_ids():
    """transformers' own implementation that knows sentinels, whose scores there are zero."""
    x, ids, scores, dO = problem(sentinels=True)
    scores = scores * (ids < E)
    grouped_mm = small(MixtralExperts, "grouped_mm")
    grouped_mm._is_expert_parallel = True  # of 5.24, which expects sentinels only then
    theirs = run(grouped_mm, x, ids, scores, dO)
    ours = run(small(MixtralExperts), x, ids, scores, dO)
    ours["d top_k_weights"] *= ids < E
    assert_same(ours, theirs)


# ---------------------------------------------------------------- what is refused


def of_gate(name, gate):
    """A class whose gate is a function of act_fn and the halves of H."""
    apply = lambda self, H: gate(self.act_fn, *H.chunk(2, dim=-1))
    return type(name, (MixtralExperts,), {"_apply_gate": apply})


def normalized(act, gate, up):
    A = act(gate) * up
    return A / A.norm(dim=-1, keepdim=True)


def with_noise(act, gate, up):
    return torch.nn.functional.dropout(act(gate) * up, 0.1, training=True)


class WithScale(MixtralExperts):
    def __init__(self, config):
        super().__init__(config)
        self.per_expert_scale = torch.nn.Parameter(torch.ones(E))


@use_experts_implementation(is_concatenated=False)
class SaysInterleaved(MixtralExperts):
    """Its gate is that of concatenated columns all the same."""


REFUSED = [
    of_gate("Swapped", lambda act, gate, up: gate * act(up)),
    of_gate("SoftCapped", lambda act, gate, up: act(gate) * 30 * torch.tanh(up / 30)),
    of_gate("Normalized", normalized),
    of_gate("GateStopped", lambda act, gate, up: act(gate).detach() * up),  # right in value alone
    of_gate("ClampedUpAlone", lambda act, gate, up: act(gate) * up.clamp(-7, 7)),
    of_gate("WithNoise", with_noise), WithScale, SaysInterleaved,
]  # fmt: skip


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_is_not_known_is_refused(cls):
    config = build(MixtralExperts).config
    config._experts_implementation = "tilemoe"
    module = fill(cls(config))
    x, ids, scores, _ = problem()
    refused(NotImplementedError, cls.__name__, module, x, ids, scores)
    refused(NotImplementedError, cls.__name__, prepare, module)


@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("removed", [(4, 0), (0, 4)], ids=["d", "n"])
def test_widths_that_no_kernel_has_are_refused_beforehand(cls, removed):
    module = small(cls)
    rows, columns = module.down_proj.shape[1:]
    rows, columns = rows - removed[0], columns - removed[1]
    module.down_proj = torch.nn.Parameter(module.down_proj[:, :rows, :columns].detach().clone())
    with pytest.raises(NotImplementedError, match=f"widths must be multiples of 8, got {rows} and {columns}"):
        tilemoe.transformers.prepare(torch.nn.ModuleList([module]))


def prepare(module):
    return tilemoe.transformers.prepare(torch.nn.ModuleList([module]))


@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts], ids=lambda cls: cls.__name__)
def test_weights_that_no_kernel_computes_with_are_refused_beforehand(cls, monkeypatch):
    assert prepare(small(cls)) and prepare(small(cls).bfloat16())
    for module, message in (
        (small(cls).to("meta"), "its gate_up_proj is on meta, expected loaded weights"),
        (small(cls).double(), "its gate_up_proj must be float32, bfloat16 or float16, got torch.float64"),
    ):
        refused(NotImplementedError, f"{cls.__qualname__}: {message}", prepare, module)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which changes nothing there
            refused(NotImplementedError, message, prepare, module)
    # A GPU's, where there may be none: what is looked at is where they lie and their dtype.
    module = small(cls)
    monkeypatch.setattr(tilemoe._library, "_no_cuda", None)
    for dtype, autocast, is_refused in (
        (torch.float32, None, True),
        (torch.bfloat16, None, False),
        (torch.float32, torch.bfloat16, False),
        (torch.float64, torch.bfloat16, True),
    ):
        on_gpu = types.SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype)
        seen = types.SimpleNamespace(_parameters={"down_proj": on_gpu, "down_proj_bias": None})
        monkeypatch.setattr(transformers_forms, "autocast_dtype", lambda device: autocast)
        if not is_refused:
            transformers_forms.refuse_weights(seen)
            continue
        with pytest.raises(NotImplementedError, match="its down_proj must be .*float.*, got"):
            transformers_forms.refuse_weights(seen)
    monkeypatch.setattr(tilemoe._library, "_no_cuda", "it was built without CUDA")
    with pytest.raises(NotImplementedError, match="on cuda:0, but it was built without CUDA"):
        transformers_forms.refuse_weights(seen)


def test_a_changed_limit_or_activation_is_read_again():
    module = small(GptOssExperts)
    data = problem()
    before = run(module, *data)
    module.limit = 1.5
    assert_same(run(module, *data), run_eager(module, *data))
    assert not torch.equal(run(module, *data)["output"], before["output"])

    module = small(MixtralExperts)
    run(module, *data)
    module.act_fn = torch.nn.Tanh()
    refused(NotImplementedError, "Tanh", run, module, *data)


def test_nothing_is_registered_by_importing():
    program = """
import sys, tilemoe, tilemoe.transformers
assert 'transformers' not in sys.modules
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as known
assert 'tilemoe' not in known
tilemoe.transformers.register('another_name')
assert 'another_name' in known and 'tilemoe' not in known
"""
    python("-c", program)


# ---------------------------------------------------------------- how it is computed


@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts, NemotronHExperts])
def test_sixteen_bits_are_no_worse_than_eager(cls):
    """Over eight problems together. Away from the clamp: a value that rounds across it changes its
    slope from 1 to 0, and a few such decide the error of either."""
    module = fill(build(cls), meets_clamp=False).bfloat16()
    ours, theirs = {}, {}
    for seed in range(8):
        x, ids, scores, dO = problem(seed)
        data = (x.bfloat16(), ids, scores.bfloat16(), dO.bfloat16())
        want = run_eager(module, *data)
        for implementation, errors in ("tilemoe", ours), ("eager", theirs):
            module.config._experts_implementation = implementation
            for name, tensor in run(module, *data).items():
                errors[name] = errors.get(name, 0) + relative_error(tensor, want[name]) ** 2
    for name, bound in theirs.items():
        assert ours[name] <= 1.05**2 * bound, (name, ours[name], bound)
        assert not 8 * 1.0 <= 1.05**2 * bound  # zeros in our place


class LargeTensors(TorchDispatchMode):
    """Notes every operation that gives memory of its own as large as the smallest weight."""

    def __init__(self, module):
        super().__init__()
        weights = [p for p in module.parameters() if p.ndim == 3]
        self.known = {p.untyped_storage().data_ptr() for p in weights}
        self.min_elements = min(p.numel() for p in weights)
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.min_elements:
                if tensor.untyped_storage().data_ptr() not in self.known:
                    self.known.add(tensor.untyped_storage().data_ptr())
                    self.seen.append(str(function))
        return out


@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts, NemotronHExperts])
def test_weights_are_read_and_gradients_written_in_place(cls):
    module = small(cls)
    tilemoe.transformers.prepare(module)
    x, ids, scores, dO = (tensor[:3] for tensor in problem())
    with LargeTensors(module) as large:
        out = module(x.requires_grad_(), ids, scores.requires_grad_())
    assert large.seen == [], "the forward pass copies weights"
    with LargeTensors(module) as large:
        out.backward(dO)
    assert set(large.seen) == {"tilemoe.experts_backward_over_H.default"} and len(large.seen) == 2
    for name, p in module.named_parameters():
        assert p.grad.stride() == p.stride(), name
    with LargeTensors(module) as large:
        module.gate_up_proj.mT.contiguous() if module.has_gate else module.up_proj.clone()
    assert large.seen, "a copy would not be noticed"


@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts, NemotronHExperts])
def test_autocast_computes_in_its_type(cls):
    """The output and x's gradient keep their float32; the GEMMs are bfloat16's."""
    module = fill(build(cls), meets_clamp=False)
    data = problem()
    want = run_eager(module, *data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(module, *data)
    for name, tensor in got.items():
        assert tensor.dtype == torch.float32
        assert relative_error(tensor, want[name]) <= 1e-2, name
    assert relative_error(got["output"], want["output"]) >= 1e-4  # float32 would be nearer


@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts])
def test_frozen_experts(cls):
    module = small(cls)
    data = problem()
    want = run_eager(module, *data)
    module.requires_grad_(False)
    got = run(module, *data)
    for name in ("output", "d hidden_states", "d top_k_weights"):
        assert_close(got[name], want[name], name)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts])
def test_weights_of_a_mapped_checkpoint(cls):
    """They may begin on any 8 bytes."""
    module = small(cls)
    for p in module.parameters():
        memory = torch.empty(p.numel() + 2)
        p.data = memory[2:].view(p.shape).copy_(p.data)
        assert p.data_ptr() % 16 == 8
    data = problem()
    assert_same(run(module, *data), run_eager(module, *data))


if __name__ == "__main__":
    tilemoe.transformers.register()
    for file, texts in ((TABLES, WRITTEN), (PAGE, LISTS)):
        for name, text in texts.items():
            before, _, after = between(file.read_text(), name)
            file.write_text(before + text() + after)
