"""tilemoe.transformers.record_routing and replay_routing, over every block of the installed
transformers that has experts."""

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tilemoe.transformers
from routing_replay_support import E, K, blocks, build, d, run, tokens
from tilemoe.transformers import record_routing, replay_routing

# Parts of which only a whole model can be run: test_a_decoder_layer_with_experts has one of them.
LAYERS = {
    "Gemma4TextDecoderLayer", "DiffusionGemmaEncoderTextLayer", "DiffusionGemmaDecoderTextLayer",
}  # fmt: skip
# Only their models make their configurations; their routers are those of other blocks.
OTHER_PARTS = {"Dots3NoteVisionMoE", "Qwen3OmniMoeTalkerTextSparseMoeBlock"}
REFUSED = {"PhimoeSparseMoeBlock": "PhimoeTopKRouter"}
of_blocks = [cls for _, cls in blocks() if cls.__name__ not in LAYERS | OTHER_PARTS]
every_block = pytest.mark.parametrize("cls", of_blocks, ids=lambda cls: cls.__name__)


@pytest.fixture(autouse=True)
def registered():
    tilemoe.transformers.register()


def recorded(block, x):
    with record_routing(block) as routing:
        out = run(block, x)
    return out, routing.ids()


def same(got, want):
    assert len(got) == len(want)
    return all(torch.equal(a, b) for a, b in zip(got, want))


@every_block
def test_replaying_its_own_ids_changes_no_bit(cls):
    """Neither of the output nor of a gradient, including the router's."""
    block, x = build(cls), tokens()
    want = run(block, x)
    got, ids = recorded(block, x)
    assert same(got, want) and ids.dtype == torch.int32 and ids.shape[:2] == (1, 18)
    if cls.__name__ in REFUSED:
        with pytest.raises(NotImplementedError, match=REFUSED[cls.__name__] + " does not choose"):
            with replay_routing(block, ids):
                run(block, x)
        assert same(run(block, x), want)
        return
    with replay_routing(block, ids):
        assert same(run(block, x), want)
    assert same(run(block, x), want)


@pytest.mark.parametrize(
    "cls", [cls for cls in of_blocks if cls.__name__ not in REFUSED], ids=lambda cls: cls.__name__
)
def test_other_ids_are_computed(cls):
    """The experts get these ids, with scores of the router's own code, which has a gradient."""
    block, x = build(cls), tokens()
    _, own = recorded(block, x)
    width = own.shape[-1]
    ids = (own + 2) % E if width > 1 else (own + 1) % E  # of groups of two: the next group's
    seen = []
    experts = next(m for m in block.modules() if hasattr(m, "is_concatenated"))
    with replay_routing(block, ids):
        hook = experts.register_forward_pre_hook(lambda _, args: seen.append(args[1:3]))
        got = run(block, x)
        hook.remove()
    (chosen, scores), = seen
    assert torch.equal(chosen.reshape(ids[0].shape), ids[0].long())
    assert (scores.abs() > 0).all() and scores.isfinite().all() and scores.requires_grad
    assert not same(got, run(block, x))


def test_a_hash_router_is_refused():
    """DeepSeek-V4's first layers choose by a table of the tokens' ids."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    class FirstLayer(v4.DeepseekV4SparseMoeBlock):
        def forward(self, hidden_states):
            ids = torch.arange(hidden_states.shape[0] * hidden_states.shape[1])
            return super().forward(hidden_states, input_ids=ids)

    FirstLayer.__module__ = v4.__name__
    block, x = build(FirstLayer, layer=0), tokens()
    _, ids = recorded(block, x)
    with pytest.raises(NotImplementedError, match="DeepseekV4HashRouter does not choose"):
        with replay_routing(block, ids):
            run(block, x)


# ---------------------------------------------------------------- a model


def model(implementation="tilemoe", **options):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **(
            dict(
                vocab_size=64, hidden_size=d, intermediate_size=32, moe_intermediate_size=16,
                num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                num_experts=E, num_experts_per_tok=K, norm_topk_prob=True,
                experts_implementation=implementation,
            )
            | options
        )
    )  # fmt: skip
    made = Qwen3MoeForCausalLM(config)
    for p in made.parameters():
        p.data = torch.randn(p.shape) * 0.1
    return made


def prompt(batch=2, length=7):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(3))


def gradients(called, of):
    """-> the loss of tokens under `called`, and every gradient."""
    of.zero_grad()
    given = prompt()
    loss = called(given, labels=given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in of.parameters())]


IMPLEMENTATIONS = ["eager", "grouped_mm", "tilemoe"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("order", ["layers_first", "tokens_first"])
def test_a_training_step(implementation, order):
    of = model(implementation)
    with record_routing(of) as routing:
        want = gradients(of, of)
    ids = routing.ids()
    assert routing.layers == [f"model.layers.{i}.mlp" for i in range(3)]
    assert ids.shape == (3, 14, K)
    given = ids.transpose(0, 1) if order == "tokens_first" else ids
    for array in (given, given.numpy().astype(np.uint8), given.reshape(*_split(given, order), K)):
        with replay_routing(of, array, order=order):
            assert same(gradients(of, of), want)
    with replay_routing(of, list(ids)):
        assert same(gradients(of, of), want)


def _split(given, order):
    return (2, 7, 3) if order == "tokens_first" else (3, 2, 7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_rollout_by_generate(implementation):
    """Prefill and decode steps are joined to the sequence that a training step has."""
    of, given = model(implementation).eval(), prompt()
    with torch.no_grad(), record_routing(of) as routing:
        made = of.generate(given, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    ids = routing.ids(batch_size=2)
    assert ids.shape == (3, 2, made.shape[1] - 1, K)  # the last token was not computed
    with torch.no_grad(), record_routing(of) as again:
        whole = of(made[:, :-1]).logits
    assert torch.equal(again.ids(batch_size=2), ids)
    of.train()
    with replay_routing(of, torch.nn.functional.pad(ids, (0, 0, 0, 1), value=-1)):
        out = of(made).logits
        out.sum().backward()
    torch.testing.assert_close(out[:, :-1], whole)
    assert all(layer.mlp.gate.weight.grad.any() for layer in of.model.layers)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding(implementation):
    """A token without ids gets nothing of the routed experts, and gives the router no gradient."""
    block = model(implementation).model.layers[0].mlp
    x = tokens(shape=(1, 6))
    _, ids = recorded(block, x)
    ids[:, 2:4] = -1
    with replay_routing(block, ids):
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        dx, *_ = torch.autograd.grad(out.square().sum(), [x, block.gate.weight])
    assert not out[0, 2:4].any() and not dx[0, 2:4].any()
    assert out[0, [0, 1, 4, 5]].any(-1).all()
    ids[:, 3, 0] = 1  # some of a token's ids
    with replay_routing(block, ids):
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
    assert out[0, 3].isnan().all() and not out[0, [0, 1, 2, 4, 5]].isnan().any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """The recomputation uses the same ids, and is not recorded."""
    of = model()
    of.gradient_checkpointing_enable({"use_reentrant": reentrant})
    of.enable_input_require_grads()
    of.train()
    with record_routing(of) as routing:
        own = gradients(of, of)
    ids = routing.ids()
    assert ids.shape == (3, 14, K)
    with replay_routing(of, ids):
        assert same(gradients(of, of), own)
    other = (ids + 1) % E
    with replay_routing(of, other):
        got = gradients(of, of)
    of.gradient_checkpointing_disable()
    with replay_routing(of, other):
        assert same(gradients(of, of), got) and not same(got, own)


def test_backward_after_the_context_is_refused():
    of, given = model(), prompt()
    of.gradient_checkpointing_enable({"use_reentrant": False})
    of.train()
    with record_routing(of) as routing:
        of(given)
    ids = routing.ids()
    with replay_routing(of, ids):
        loss = of(given, labels=given).loss
    with pytest.raises(RuntimeError, match="backward recomputes model.layers.2.mlp after replay_routing has ended"):
        loss.backward()
    with replay_routing(of, ids):
        late = of(given, labels=given).loss
    with pytest.raises(RuntimeError, match="after replay_routing has ended"):
        with replay_routing(of, ids):
            late.backward()


def test_compiled():
    torch._dynamo.reset()
    of = model()
    with record_routing(of) as routing:
        want = gradients(of, of)
    ids = routing.ids()
    tilemoe.transformers.prepare(of)
    compiled = torch.compile(of, backend="aot_eager")
    for given in (ids, (ids + 1) % E, ids):
        with replay_routing(of, given):
            eager = gradients(of, of)
        with replay_routing(of, given):
            got = gradients(compiled, of)
        for a, b in zip(got, eager):
            torch.testing.assert_close(a, b)
    assert same(eager, want)
    with record_routing(of) as routing:
        gradients(compiled, of)
    assert torch.equal(routing.ids(), ids)
    torch._dynamo.reset()


def test_accelerates_hooks():
    """device_map replaces forward on each module."""
    hooks = pytest.importorskip("accelerate.hooks")
    of = model()
    with record_routing(of) as routing:
        want = gradients(of, of)
    for module in of.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    with replay_routing(of, routing.ids()):
        assert same(gradients(of, of), want)
    assert same(gradients(of, of), want)


def test_no_host_sync():
    """No operator reads a tensor's values on the host."""
    block, x, called = model().model.layers[0].mlp, tokens(), []
    run(block, x)  # compares the form of the experts once

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            called.append(str(op))
            return op(*args, **(kwargs or {}))

    with Calls(), record_routing(block) as routing:
        block(x)
        ids = routing.ids()
    with Calls(), replay_routing(block, ids):
        block(x)
    assert "aten.gather.default" in called
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & {*called}


def test_all_hidden_layers():
    """Engines return ids of layers without experts, too."""
    of = model(mlp_only_layers=[1])
    with record_routing(of) as routing:
        want = gradients(of, of)
    ids = routing.ids()
    assert routing.layers == ["model.layers.0.mlp", "model.layers.2.mlp"]
    every = torch.stack([ids[0], torch.full_like(ids[0], E - 1), ids[1]])
    for given, order in ((every, "layers_first"), (every.transpose(0, 1), "tokens_first")):
        with replay_routing(of, given, order=order):
            assert same(gradients(of, of), want)


def test_a_decoder_layer_with_experts():
    """Gemma's experts and router are parts of the decoder layer itself."""
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

    torch.manual_seed(0)
    of = Gemma4TextModel(
        Gemma4TextConfig(
            vocab_size=64, vocab_size_per_layer_input=64, hidden_size=d,
            hidden_size_per_layer_input=8, intermediate_size=32, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            global_head_dim=8, enable_moe_block=True, num_experts=E, top_k_experts=K,
            layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
        )
    )  # fmt: skip

    def step():
        of.zero_grad()
        out = of(prompt()).last_hidden_state
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in of.parameters() if p.grad is not None)]

    want = step()
    with record_routing(of) as routing:
        assert same(step(), want)
    assert routing.layers == ["layers.0", "layers.1"]
    with replay_routing(of, routing.ids()):
        assert same(step(), want)
    with replay_routing(of, (routing.ids() + 1) % E):
        assert not same(step(), want)


def test_what_does_not_fit_is_refused():
    of, given = model(), prompt()
    ids = torch.zeros(3, 14, K, dtype=torch.int64)

    def refused(message, ids, kind=ValueError, **options):
        with pytest.raises(kind, match=message):
            with replay_routing(of, ids, **options):
                of(given)

    refused("order must be 'layers_first' or 'tokens_first', got 'other'", ids, order="other")
    refused(r"ids has shape \(14, 3\), expected \(layers, tokens, K\)", ids[0])
    refused(r"ids has shape \(3, 14, 3\), which is 14 layers with order='tokens_first'", ids,
            order="tokens_first")  # fmt: skip
    refused("ids has 2 layers, expected 3, the layers with experts", list(ids[:2]))
    refused("ids must be integers in model.layers.0.mlp, got torch.float32", ids.float())
    refused("ids has 13 tokens in model.layers.0.mlp, expected 14", ids[:, 1:])
    refused("ids has 2 experts per token in model.layers.0.mlp, expected 3",
            ids[..., 1:])  # fmt: skip
    uneven = [ids[0], ids[1], ids[2, :, 1:]]
    refused("ids has 2 experts per token in model.layers.2.mlp", uneven)
    refused("expected 3 layers with experts or 3 hidden layers", ids[:2])
    with pytest.raises(RuntimeError, match="model.layers.0.mlp, .* did not run in replay_routing"):
        with replay_routing(of, ids):
            pass
    with pytest.raises(RuntimeError, match="did not run in record_routing"):
        with record_routing(of) as routing:
            pass
        routing.ids()
    with pytest.raises(ValueError, match="Linear has no layer of experts"):
        record_routing(torch.nn.Linear(2, 2))
    with record_routing(of) as routing:
        of(given)
        with pytest.raises(RuntimeError, match="already in a record_routing"):
            with replay_routing(of, ids):
                pass
    with pytest.raises(ValueError, match="batch_size must divide the tokens of each forward, got batch_size=3 and 14 tokens"):
        routing.ids(batch_size=3)
    assert "forward" not in vars(of.model.layers[0].mlp)
