"""examples/pretrain's model, in one process: initial values, experts, the loss without logits,
torch.compile, configurations and plan; and what speed.py concludes from its measurements."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
sys.path.append(str(EXAMPLE))

import experts  # noqa: E402
import head  # noqa: E402
import optimizer  # noqa: E402
import parallel  # noqa: E402
import plan  # noqa: E402
import predict  # noqa: E402
import speed  # noqa: E402
import tilemoe  # noqa: E402
import train  # noqa: E402
from configs import CONFIGS, configuration  # noqa: E402
from model import RECOMPUTE, Transformer  # noqa: E402
from tilemoe.bench import records  # noqa: E402


def model_of(c, *args, seed=0, **options):
    model = Transformer(c, *args)
    model.initialise(seed, **options)
    return model


def batch(c, sequences=2):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(c.vocabulary, (sequences, c.context + 1), generator=generator)


def loss_and_gradients(model, tokens):
    losses, routed = model(tokens)
    losses.total.backward()
    return [losses.total.detach(), *routed, *(p.grad for p in model.parameters())]


def test_initial_values_depend_on_the_seed_alone():
    c = CONFIGS["tiny"]
    torch.manual_seed(1)
    one = model_of(c)
    torch.manual_seed(2)
    with torch.device("meta"):
        late = Transformer(c)
    late.to_empty(device="cpu")
    late.initialise(0)
    other = model_of(c, seed=1)
    for (name, a), b, different in zip(
        one.named_parameters(), late.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert (a.dim() == 1) == torch.equal(a, different), name
        added = name.endswith(("attention.out.weight", "down_proj", "down.weight"))
        if a.dim() > 1:
            expected = 0.02 / (2 if added else 1)  # two layers: sqrt(2 * 2)
            assert a.std().item() == pytest.approx(expected, rel=0.1), name


def test_renumbered_experts_are_the_same_function():
    c = CONFIGS["tiny"]
    order = torch.randperm(c.E, generator=torch.Generator().manual_seed(3))
    given, renumbered = model_of(c), model_of(c, order=order)
    (a, a_counts, *_), (b, b_counts, *_) = (
        loss_and_gradients(model, batch(c)) for model in (given, renumbered)
    )
    assert abs(a - b) <= 1e-6 * a
    assert torch.equal(b_counts, a_counts[:, order]) and not torch.equal(b_counts, a_counts)


def test_grouped_mm_computes_the_same_model():
    c = CONFIGS["tiny"]
    ours, theirs = model_of(c), Transformer(c, "grouped_mm")
    theirs.load_state_dict(ours.state_dict())
    found = [loss_and_gradients(model, batch(c)) for model in (ours, theirs)]
    for mine, other in zip(*found, strict=True):
        assert not (mine - other).abs().max() > 1e-5 * max(1e-2, float(other.abs().max()))


@pytest.mark.parametrize("name", experts.PEERS)
def test_all_experts_have_the_same_state_dict(name):
    c = CONFIGS["tiny"]
    shapes = lambda model: {key: value.shape for key, value in model.state_dict().items()}
    with torch.device("meta"):
        assert shapes(Transformer(c, name)) == shapes(Transformer(c))


def test_what_cannot_run_is_refused_in_a_sentence():
    plain, rounded = configuration("tiny"), configuration("tiny", rounding="nearest")
    bounded = configuration("tiny", capacity=1.0)
    for name in ("scattermoe", "sonic-moe"):
        assert "requires a GPU, and this process has none" in experts.refusal(name, plain, "cpu")
        assert f"{name} is not installed; run pip install" in experts.refusal(name, plain, "cuda")
        assert "does not support --rounding" in experts.refusal(name, rounded, "cuda")
        assert "does not support --capacity" in experts.refusal(name, bounded, "cuda")
    assert "does not support --rounding" in experts.refusal("grouped_mm", rounded, "cpu")
    assert experts.refusal("grouped_mm", plain, "cpu") is None
    for c in (plain, rounded, bounded):
        assert experts.refusal("tilemoe", c, "cpu") is None
    with pytest.raises(ValueError, match="--rounding and --capacity cannot be combined"):
        configuration("tiny", rounding="up", capacity=1.0)


@pytest.mark.parametrize("tokens", [-32, 48, 128])
def test_tokens_that_share_no_micro_batch_evenly_are_refused(tokens, capsys):
    own = ["--config", "tiny", "--data", "data", "--output", "out", "--micro-batch", "2"]
    assert train.arguments([*own, "--routing-tokens", "16"]).routing_tokens == 16
    with pytest.raises(SystemExit):
        train.arguments([*own, "--routing-tokens", str(tokens)])
    expected = "expected an integer >= 1, got '-32'"
    if tokens > 0:
        expected = f"--routing-tokens must divide the 64 tokens of a micro-batch, got {tokens}"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("T", [1, 6, 8, 17])
def test_the_loss_of_some_rows_at_a_time_is_that_of_all(T, monkeypatch):
    monkeypatch.setattr(head, "ROWS", 8)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, 24, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 24, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(40, (T,), generator=generator)
    expected = F.cross_entropy(x @ weight.T, targets)
    found = head.LinearCrossEntropy.apply(x, weight, targets, head.cross_entropy)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = torch.autograd.grad(3 * expected, (x, weight))
    for ours, theirs in zip(torch.autograd.grad(3 * found, (x, weight)), wanted):
        assert not (ours - theirs).abs().max() > 1e-6 * theirs.abs().max()


@pytest.mark.parametrize(
    "name, routing",
    [
        ("tilemoe", {}),
        ("tilemoe", {"rounding": "stochastic"}),
        ("tilemoe", {"rounding": "stochastic", "routing_tokens": 16}),
        ("tilemoe", {"capacity": 1.0, "routing_tokens": 16}),
        ("grouped_mm", {}),
        ("spoiled", {}),
    ],
)
def test_all_blocks_are_one_graph(name, routing):
    c = dataclasses.replace(CONFIGS["tiny"], layers=4, m=4, **routing)
    # bfloat16: torch.compile's grouped_mm takes nothing else.
    plain, compiled = (model_of(c, name).to(torch.bfloat16) for _ in range(2))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled.compile_blocks(backend=backend)
    for mine, other in zip(
        loss_and_gradients(compiled, batch(c)), loss_and_gradients(plain, batch(c)), strict=True
    ):
        assert torch.equal(mine, other)
    assert len(graphs) == 2  # a block, and the rows' loss


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recomputation_changes_no_bit(recompute):
    c = CONFIGS["tiny"]
    whole, other = model_of(c), model_of(c, "tilemoe", recompute)
    for a, b in zip(
        loss_and_gradients(whole, batch(c)), loss_and_gradients(other, batch(c)), strict=True
    ):
        assert torch.equal(a, b)


SIZES = [
    ("S1", 218.6e6, 29.9e6),
    ("S2", 823.1e6, 30.4e6),
    ("0.5B", 521e6, 124e6),
    ("1.4B", 1.44e9, 168e6),
    ("7B", 6.768e9, 1.106e9),
    ("30B", 30.9e9, 3.77e9),
]


@pytest.mark.parametrize("name, total, active", SIZES)
def test_the_configurations_have_their_sizes(name, total, active):
    counted = plan.parameters(CONFIGS[name])
    assert counted[0] == pytest.approx(total, rel=6e-3)
    assert counted[1] == pytest.approx(active, rel=6e-3)


@pytest.mark.parametrize("name", ["tiny", "tiny-bias"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_plan_counts_what_the_model_has_and_keeps(name, recompute):
    c = CONFIGS[name]
    memory = plan.Plan(c, "tilemoe", recompute, "float32", False, processes=2).memory(3)
    model = model_of(c, "tilemoe", recompute)
    total = sum(p.numel() for p in model.parameters())
    one_expert = 3 * c.d * c.n
    assert plan.parameters(c) == (total, total - c.layers * (c.E - c.K) * one_expert)
    assert memory["AdamW's moments' shard"] == 8 * total // 2
    block = sum(p.numel() for p in model.blocks[0].parameters())
    assert memory["gathered parameters"] == 4 * (total - c.layers * block + 2 * block)
    assert memory["saved for backward"] == plan.kept_for_backward(model, batch(c, 3))


def test_the_plan_counts_codes_of_H():
    """The command's options give the bytes of H in 16 bits, or of codes with two scales of a row."""
    kept, of_two, words = {}, {}, ["--config", "tiny-wide", "--plan", "--recipe", "fp8"]
    for save_h in ((), ("--save-h", "fp8")):
        args = train.arguments([*words, *save_h])
        c = configuration(args.config, recipe=args.recipe, save_h=args.save_h)
        of = plan.Plan(c, "tilemoe", "none", "mixed", False, processes=2)
        kept[args.save_h] = of.kept(3)
        of_two[args.save_h] = dataclasses.replace(of, together=2).kept(3)
    less = c.layers * 3 * c.context * c.K * (4 * c.n - (2 * c.n + 8))
    assert kept[None] - kept["fp8"] == less
    assert of_two[None] - of_two["fp8"] == 2 * less  # of the tokens of both
    for recipe in ("bf16", "fp8_forward"):
        with pytest.raises(ValueError, match=f"--save-h fp8 requires --recipe fp8, got --recipe {recipe}"):
            configuration("tiny-wide", recipe=recipe, save_h="fp8")


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_largest_micro_batch_is_the_largest(recompute):
    of = plan.Plan(CONFIGS["tiny"], "tilemoe", recompute, "mixed", False, processes=1)
    for device in (4e6, 1e7):
        largest = of.largest_micro_batch(device)
        taken = [plan.peak(of.memory(size)) for size in (largest, largest + 1)]
        assert taken[0] <= plan.USABLE * device < taken[1]
    assert of.largest_micro_batch(1e6) == 0


def test_a_layers_time_is_the_best_known(tmp_path, monkeypatch):
    trainings = tmp_path / "pretrain.jsonl"
    trainings.touch()
    monkeypatch.setattr(predict, "TRAININGS", trainings)
    c = CONFIGS["7B"]
    forward, backward, source = predict.experts(c, 24576)
    assert source == "measurement of this layer"
    ms = {one.name: one.median("ms") for one in records.read(predict.KERNELS) if "ms" in one.values}
    assert predict.LAYERS["cuda"]["7b-n256"] == (24576, c.d, c.n, c.E, c.K)
    assert forward == pytest.approx(ms["kernels/7b-n256/forward"] / 1e3, rel=1e-9)
    assert backward == pytest.approx(ms["kernels/7b-n256/backward"] / 1e3, rel=1e-9)
    assert predict.experts(CONFIGS["S1"], 24576)[2] == "mean of measured layers"
    assert len(predict.measured()) == 11

    values = {"config": "7B", "layers": 4, "experts": "tilemoe", "micro_batch": 6}
    training = lambda values: records.Measurement("pretrain-speed/7B/6", "a GPU", {}, "0", values)
    records.write(trainings, [training(values | {"kind.experts_ms": 20.0}),
                              training(values | {"experts": "grouped_mm"})])  # fmt: skip
    forward, backward, source = predict.experts(c, 24576)
    assert source == "profile of a training with this layer"
    assert forward + backward == pytest.approx(20e-3 / 4, rel=1e-9)


def test_fp8_is_predicted_as_auto_estimates_it():
    bf16, fp8, forward_alone = (
        configuration("7B", recipe=recipe) for recipe in ("bf16", "fp8", "fp8_forward")
    )
    estimate = tilemoe.choose_recipe(24576, 1536, 256, 128, 8, capability=(9, 0))
    *want, source = predict.experts(bf16, 24576)
    *got, source_of_fp8 = predict.experts(fp8, 24576)
    ratio = estimate.fp8_ms / estimate.bf16_ms
    assert ratio != 1 and got == pytest.approx([ratio * time for time in want], rel=1e-12)
    assert source_of_fp8 == f"{source}, times FP8's estimate"
    known = [
        predict.is_known(plan.Plan(c, "tilemoe", "none", "mixed", False, processes=1))
        for c in (bf16, fp8, forward_alone)
    ]
    assert known == [True, True, False]


def test_a_prediction_is_the_sum_of_its_parts():
    c = CONFIGS["7B"]
    parts, _ = predict.step(c, 24576, processes=1)
    forward, backward, _ = predict.experts(c, 24576)
    assert (forward + backward) * 40 == parts["experts"]
    shared, _ = predict.step(c, 24576, processes=4)
    assert shared["parameters"] == parts["parameters"] / 4
    assert {k: v for k, v in shared.items() if k != "parameters"} == {
        k: v for k, v in parts.items() if k != "parameters"
    }


def test_some_layers_of_a_configuration():
    assert configuration("7B", 4).layers == 4 and configuration("7B").layers == 40
    for layers in (0, 41):
        with pytest.raises(ValueError, match=rf"--layers must be in \[1, 40\] for 7B, got {layers}"):
            configuration("7B", layers)


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("largest, factor", [(0.5, 0.1), (20.0, 1.0)])
def test_clipping_scales_the_gradients_to_a_norm(alone, largest, factor):
    model = parallel.shard(model_of(CONFIGS["tiny"]), alone, "float32")
    loss_and_gradients(model, batch(CONFIGS["tiny"]))
    parameters = list(model.parameters())
    scale = 5 / torch.nn.utils.get_total_norm([p.grad.full_tensor() for p in parameters])
    for p in parameters:
        p.grad.to_local().mul_(scale)
    before = [p.grad.full_tensor().clone() for p in parameters]
    assert parallel.clip(parameters, largest).item() == pytest.approx(5, rel=1e-6)
    for p, was in zip(parameters, before, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), factor * was, rtol=1e-5, atol=0)


def test_adamw_on_shards_is_torchs(alone):
    """The same bits, state too; and a step that is to be skipped changes nothing."""
    c = CONFIGS["tiny"]
    args = types.SimpleNamespace(learning_rate=1e-2, weight_decay=0.1)
    models = [parallel.shard(model_of(c), alone, "float32") for _ in range(2)]
    ours = optimizer.optimizer_of(models[0], args)
    groups = [
        {"params": [p for p in models[1].parameters() if p.dim() > 1]},
        {"params": [p for p in models[1].parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for seed in range(3):
        for model, stepped in zip(models, (ours, theirs)):
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                gradient = torch.empty(p.shape).normal_(generator=generator)
                p.grad = distribute_tensor(gradient, alone, p.placements)
            stepped.step()
    whole = lambda value: value.full_tensor() if isinstance(value, DTensor) else value
    values = lambda model, stepped: [
        whole(value).clone()
        for p in model.parameters()
        for value in (p.detach(), *stepped.state[p].values())
    ]
    mine = values(models[0], ours)
    for a, b in zip(mine, values(models[1], theirs), strict=True):
        assert torch.equal(a, b)
    ours.step(skip=torch.ones(()))
    for a, b in zip(mine, values(models[0], ours), strict=True):
        assert torch.equal(a, b)
    ours.step(skip=torch.zeros(()))
    assert not any(map(torch.equal, mine, values(models[0], ours)))


def test_small_blocks_are_gathered_together(monkeypatch):
    c = dataclasses.replace(CONFIGS["tiny"], layers=5)
    blocks = list(model_of(c).blocks)
    size = sum(p.numel() for p in blocks[0].parameters())
    for size_limit, expected in ((1, [1] * 5), (size + 1, [2, 2, 1]), (99 * size, [5])):
        monkeypatch.setattr(plan, "GROUP", size_limit)
        found = list(parallel.groups(blocks))
        assert [len(group) for group in found] == expected
        assert sum(found, []) == blocks


def test_a_kernel_between_the_heads_is_the_heads():
    kernels = [("nvjet_a", 5, 1.0), ("nvjet_b", 15, 2.0), ("triton_x", 16, 4.0), ("flash", 17, 8.0)]
    found = speed.by_kind(kernels, head=[(10, 20)])
    assert found == {"gemms": 1.0, "head": 6.0, "attention": 8.0}


def lines(step_ms, **more):
    """The lines of two rounds of a job."""
    values = {"step_ms": step_ms, "update_ms": [10.0, 12.0], "peak_flops": 1e12} | more
    values |= {"flop_of_token": 1e6, "kind.experts_ms": 20.0}
    return [records.Measurement("", "a GPU", {}, "abc", values)] * 2


def test_rounds_become_quartiles():
    found = speed.merged(1000, lines([50.0, 100.0, 200.0]))
    assert found["step_ms"] == [62.5, 100.0, 175.0] and found["update_ms"] == [10.0, 11.0, 12.0]
    assert found["tokens_per_s_and_process"][1] == 10_000 and found["rounds"] == 2
    assert found["mfu"] == pytest.approx(0.01) and found["kind.experts_ms"] == 20.0
    assert "flop_of_token" not in found and "peak_flops" not in found
    refused = {"does_not_fit": "out of memory"}
    measured = [records.Measurement("", "a GPU", {}, "abc", refused)]
    assert speed.merged(1000, measured) == refused


def curve(value, noise=0.0, steps=40):
    return [value * (1 + noise * (-1) ** i) for i in range(steps)]


def runs(**changed):
    """Five runs that agree, but for what is given: {run: {key: values}}."""
    noise = {"tilemoe": 2e-3, "grouped_mm": 2e-3, "renumbered": 2e-3, "spoiled": 2e-3, "float32": 0}
    made = {name: {key: curve(2.0, n) for key in speed.KEYS} for name, n in noise.items()}
    for name, values in changed.items():
        made[name] |= values
    return made


@pytest.mark.parametrize(
    "changed, missed",
    [
        ({}, []),
        ({"loss": curve(2.0)[:20] + curve(2.005)[20:]}, ["loss of the last steps"]),
        (
            {"gradient_norm": curve(2.0)[:20] + curve(1.99)[20:]},
            ["gradient_norm of the last steps"],
        ),
        ({"norm_dW2": curve(2.1)}, ["norm_dW2 of the first steps"]),
        ({"loss": curve(2.0, 4e-3)}, ["loss of the first steps"]),
        ({"loss": curve(float("nan"))}, ["loss of the last steps", "loss of the first steps"]),
    ],
)
def test_the_guard_finds_what_it_is_to_find(changed, missed):
    assert speed.judge(runs(tilemoe=changed), 20)[1]["tilemoe"] == missed


def test_the_guard_allows_what_a_permutation_does():
    other = {"loss": curve(2.0)[:20] + curve(2.01)[20:]}
    ours = {"loss": curve(2.0)[:20] + curve(1.985)[20:]}
    assert speed.judge(runs(tilemoe=ours, renumbered=other), 20)[1]["tilemoe"] == []
    assert speed.judge(runs(tilemoe=ours), 20)[1]["tilemoe"] != []
