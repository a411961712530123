"""MoE in the place of six families' MoE blocks: arguments by `options_of`, parameters by
`from_huggingface`, and the output, the loss and every gradient those of the block that transformers
has, in float64 with `eager` experts."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from checks import refused, short
import module_support
import target
from comparison import LIMITS
from module_support import same_bits
from tilemoe import MoE
from tilemoe.state_dict import from_huggingface, options_of, to_huggingface

T, d, n, E, K = 39, 32, 24, 8, 3
COMMON = dict(
    vocab_size=98, hidden_size=d, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts_per_tok=K, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DEEPSEEK = dict(
    n_routed_experts=E, moe_intermediate_size=n, intermediate_size=40, n_shared_experts=2,
    first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, q_lora_rank=16,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
)  # fmt: skip
QWEN = dict(num_experts=E, moe_intermediate_size=n, intermediate_size=40)
QWEN_NEXT = dict(
    shared_expert_intermediate_size=40, layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=8,
)  # fmt: skip
OTHERS = dict(intermediate_size=n)
# By name: the family, its block, and what its configuration has in addition to COMMON.
LAYERS = {
    "deepseek_v3": ("deepseek_v3", DeepseekV3MoE, DEEPSEEK),
    "deepseek_v3, sigmoids as they are": (
        "deepseek_v3", DeepseekV3MoE, DEEPSEEK | dict(norm_topk_prob=False, topk_group=3)
    ),
    "deepseek_v3, no groups": (
        "deepseek_v3", DeepseekV3MoE, DEEPSEEK | dict(n_group=1, topk_group=1)
    ),
    "gpt_oss": ("gpt_oss", GptOssMLP, OTHERS | dict(num_local_experts=E)),
    "mixtral": ("mixtral", MixtralSparseMoeBlock, OTHERS | dict(num_local_experts=E)),
    "olmoe": ("olmoe", OlmoeSparseMoeBlock, OTHERS | dict(num_experts=E)),
    "qwen3_moe": ("qwen3_moe", Qwen3MoeSparseMoeBlock, QWEN | dict(norm_topk_prob=True)),
    "qwen3_moe, geglu": ("qwen3_moe", Qwen3MoeSparseMoeBlock, QWEN | dict(hidden_act="gelu")),
    "qwen3_next": ("qwen3_next", Qwen3NextSparseMoeBlock, QWEN | QWEN_NEXT),
}  # fmt: skip
each_layer = pytest.mark.parametrize("name", LAYERS)
each_family = pytest.mark.parametrize("family", sorted({family for family, *_ in LAYERS.values()}))


def config_of(family, **options):
    classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    config = classes[family](**(COMMON | options))
    config._experts_implementation = "eager"
    return config


def normal(g, *shape):
    return torch.randn(shape, generator=g, device="cpu")


def fill(module, seed=0):
    """Unit-scale weights, nonzero biases; gpt-oss's so large in float32 that its clamp is met, and
    no value of it in 16 bits, where one that rounds across it changes its slope."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if t.ndim < 2:
                t.copy_(normal(g, *t.shape) * 0.3)
                continue
            is_transposed = t.ndim == 3 and "GptOss" in type(module).__name__
            t.copy_(normal(g, *t.shape) * t.shape[1 if is_transposed else -1] ** -0.5)
            if is_transposed and "gate_up" in name and target.DEVICE == "cpu":
                t.mul_(4)
    return module


def block_of(name):
    """A block of transformers in the dtype of the tests, its configuration."""
    family, block, options = LAYERS[name]
    config = config_of(family, **options)
    return fill(block(config)).to(target.DEVICE, target.DTYPE), config


def batch_for(block):
    """x, dO (3, T / 3, d): tokens whose choice 16-bit logits do not turn over, any two of which are
    further apart than they round."""
    g = torch.Generator().manual_seed(1)
    x = normal(g, 12 * T, d).to(target.DEVICE, target.DTYPE)
    router = getattr(block, "router", getattr(block, "gate", None))
    logits = x.double() @ router.weight.detach().double().T
    if getattr(router, "bias", None) is not None:
        logits = logits + router.bias.detach().double()
    gaps = logits.sort(-1).values.diff(dim=-1).min(-1).values
    x = x[gaps > 2.0**-5][:T]
    assert x.shape == (T, d)
    dO = normal(g, T, d).to(target.DEVICE, target.DTYPE)
    return [t.reshape(3, T // 3, d).contiguous() for t in (x, dO)]


def results(module, x, dO):
    """-> {name: tensor}: the output, and the gradient of <out, dO> to x and to every parameter, by
    our names."""
    x = x.detach().clone().requires_grad_()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out  # gpt-oss's router scores
    names, parameters = zip(*module.named_parameters())
    loss = (out * dO.to(out.dtype)).sum(dtype=torch.float64)
    dx, *gradients = torch.autograd.grad(loss, [x, *parameters])
    ours = from_huggingface(dict(zip(names, gradients)))
    return {"out": out, "dx": dx} | {"d" + name: g for name, g in ours.items()}, loss


def layer_for(block, config):
    moe = MoE(
        **options_of(config), return_aux=False, device=target.DEVICE, dtype=target.DTYPE
    )
    moe.load_state_dict(from_huggingface(block.state_dict()))
    return moe


def check(got, want, dO):
    (got, loss), (want, want_loss) = got, want
    module_support.check(got, want)
    scale = want["out"].double().norm() * dO.double().norm()
    assert (loss - want_loss).abs() <= LIMITS[got["out"].dtype].whole * scale


@each_layer
def test_the_layer_computes_what_transformers_does(name):
    block, config = block_of(name)
    x, dO = batch_for(block)
    want = results(copy.deepcopy(block).double(), x.double(), dO)
    moe = layer_for(block, config)
    check(results(moe, x, dO), want, dO)
    # Each option and each parameter that the family has counts.
    of_sigmoid = moe.scoring.startswith("sigmoid")
    kinds = ("sigmoid", "sigmoid_renormalized") if of_sigmoid else (
        "softmax_over_all", "softmax_renormalized"
    )  # fmt: skip
    slips = {"scoring": kinds[moe.scoring == kinds[0]]}
    if of_sigmoid:
        slips["routed_scaling_factor"] = 1.0
    if moe.n_group > 1:
        slips |= {"n_group": 1, "group_score": "max"}
    for option, value in slips.items():
        other = layer_for(block, config)
        setattr(other, option, value)
        if option == "n_group":
            other.topk_group = 1
        with pytest.raises(AssertionError):
            check(results(other, x, dO), want, dO)
            print(f"nobody noticed that {option} is {value}")
    for parameter, tensor in moe.state_dict().items():
        other = layer_for(block, config)
        other.state_dict()[parameter].mul_(0.5)
        with pytest.raises(AssertionError):
            check(results(other, x, dO), want, dO)
            print(f"nobody noticed that {parameter} is half of what it was")


def test_options_are_the_models():
    """Two of them written out, by their published configurations."""
    deepseek = options_of(transformers.DeepseekV3Config())
    assert deepseek == dict(
        hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, activation="swiglu",
        scoring="sigmoid_renormalized", selection_bias=True, n_group=8, topk_group=4,
        routed_scaling_factor=2.5, shared_intermediate_size=2048, router_dtype=torch.float32,
    )  # fmt: skip
    assert options_of(transformers.GptOssConfig(num_local_experts=32)) == dict(
        hidden_size=2880, intermediate_size=2880, num_experts=32, top_k=4, activation="swiglu",
        scoring="softmax_over_chosen", clamp=7.0, alpha=1.702, up_shift=1.0, bias=True,
        router_bias=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("llama", {}, "model_type must be one of deepseek_v3, .*, got 'llama'"),
        ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise must be 0.0 for MoE, got 0.1"),
        ("olmoe", dict(hidden_act="mish"), "hidden_act must be one of silu.*, got 'mish'"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func must be 'sigmoid' for MoE, got 'softmax'"),
        ("gpt_oss", dict(swiglu_limit=9.0), "swiglu_limit must be 7.0 for MoE, got 9.0"),
    ],
    ids=short,
)
def test_what_the_layer_does_not_have_is_refused_by_name(family, options, message):
    refused(ValueError, message, options_of, config_of(family, **options))


# ---------------------------------------------------------------- files of the hub


def model_of(family):
    options = next(options for of, _, options in LAYERS.values() if of == family)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(family, **options)).float()


@pytest.mark.cpu
@each_family
def test_a_model_as_its_files_have_it(family, tmp_path):
    """transformers writes a model with the names that the hub's files have."""
    from safetensors.torch import load_file, save_file

    model = fill(model_of(family))
    model.save_pretrained(tmp_path / "theirs")
    files = load_file(tmp_path / "theirs" / "model.safetensors")
    block = {"mixtral": "block_sparse_moe"}.get(family, "mlp")
    of_one = {"mixtral": "w1"}.get(family, "gate_proj")
    one = f"model.layers.1.{block}.experts.0.{of_one}.weight"
    assert (one in files) == (family != "gpt_oss")
    ours = from_huggingface(files)
    assert not any(".experts.0." in name or "block_sparse" in name for name in ours)
    own = from_huggingface(model.state_dict())
    same_bits(ours, {name: own[name] for name in ours})
    assert {name for name in own if ".mlp." in name} <= set(ours)

    prefix = "model.layers.1.mlp."
    x = normal(torch.Generator().manual_seed(3), 2, 5, d)
    moe = MoE(**options_of(model.config), return_aux=False)
    layer = {name: t for name, t in ours.items() if name.startswith(prefix)}
    moe.load_state_dict({name.removeprefix(prefix): t for name, t in layer.items()})
    want = model.model.layers[1].mlp(x)
    torch.testing.assert_close(moe(x), want[0] if isinstance(want, tuple) else want)

    back = to_huggingface(ours, family)
    same_bits(back, files)
    assert back.keys() == files.keys()
    (tmp_path / "ours").mkdir()
    model.config.save_pretrained(tmp_path / "ours")
    save_file(back, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    load = transformers.AutoModelForCausalLM.from_pretrained
    again = load(tmp_path / "ours", dtype=torch.float32)
    same_bits(again.state_dict(), model.state_dict())
