"""The experts classes of transformers on a GPU, in bfloat16, and a model that trains and generates.
Run by --device cuda."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from checks import refused
import tilemoe.transformers
from quantized_checkpoints import experts_of, load, logits, make_in, tokens as token_ids
from tilemoe.integrations import quantized_experts
from transformers_support import (
    assert_same, build, decorated_classes, fill, problem, relative_error, run, run_eager,
)  # fmt: skip

CLASSES = [cls for _, cls in decorated_classes()]
KINDS = [MixtralExperts, GptOssExperts, NemotronHExperts]


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()


def on_gpu(cls):
    # Away from the clamp, across which a value that rounds changes its slope from 1 to 0.
    module = fill(build(cls), meets_clamp=False).to("cuda", torch.bfloat16)
    module.config._experts_implementation = "tilemoe"
    return module


def data(**options):
    x, ids, scores, dO = (tensor.cuda() for tensor in problem(**options))
    return x.bfloat16(), ids, scores.bfloat16(), dO.bfloat16()


@pytest.mark.parametrize("sentinels", [False, True], ids=["own", "sentinels"])
@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_every_class_is_as_eager_or_refused(cls, sentinels):
    module = on_gpu(cls)
    try:
        tilemoe.transformers.prepare(module)
    except NotImplementedError as refusal:
        print(f"refused: {refusal}")
        with pytest.raises(NotImplementedError):
            run(module, *data())
        return
    given = data(sentinels=sentinels)
    assert_same(run(module, *given), run_eager(module, *given))


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_autocast(cls):
    module = fill(build(cls), meets_clamp=False).cuda()
    module.config._experts_implementation = "tilemoe"
    given = tuple(tensor.cuda() for tensor in problem())
    want = run_eager(module, *given)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = run(module, *given)
    for name, tensor in got.items():
        assert tensor.dtype == torch.float32
        assert relative_error(tensor, want[name]) <= 1e-2, name


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_float32_is_refused_beforehand_but_under_autocast(cls):
    experts = torch.nn.ModuleList([fill(build(cls)).cuda()])
    with pytest.raises(NotImplementedError, match="must be bfloat16 or float16 on CUDA, got float32 on cuda:0"):
        tilemoe.transformers.prepare(experts)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert tilemoe.transformers.prepare(experts)
    assert tilemoe.transformers.prepare(experts.bfloat16())


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_weights_off_16_bytes_are_refused(cls):
    module = on_gpu(cls)
    for p in module.parameters():
        memory = torch.empty(p.numel() + 4, dtype=p.dtype, device="cuda")
        p.data = memory[4:].view(p.shape).copy_(p.data)
        assert p.data_ptr() % 16 == 8
    refused(ValueError, "is not aligned to 16 bytes", run, module, *data())


def test_a_model_trains_and_generates():
    config = MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="tilemoe")
    model = model.to("cuda", torch.bfloat16)
    tokens = torch.randint(3, 97, (3, 11), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(30):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    model.eval()
    prompt = dict(inputs=tokens[:1], max_new_tokens=8, do_sample=False)
    text = model.generate(**prompt)
    assert text.shape == (1, 19)
    model.set_experts_implementation("eager")
    logits = model(input_ids=tokens).logits
    model.set_experts_implementation("tilemoe")
    assert relative_error(model(input_ids=tokens).logits, logits.double()) <= 2e-2


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "nf4"])
def test_quantised_experts_of_a_checkpoint(format, tmp_path):
    """They are loaded to the GPU and compute with the values of the dequantised model."""
    options = make_in(format, tmp_path) | dict(device_map="cuda")
    model = load(tmp_path, **options)
    for experts in experts_of(model):
        quantized = quantized_experts.get(experts, "gate_up_proj")
        assert quantized.format == format and quantized.device.type == "cuda"
    want = load(tmp_path, **options).dequantize()
    assert torch.equal(logits(model), logits(want))
    found = []
    for each in (model, want):
        x = each.get_input_embeddings()(token_ids().cuda()).detach().requires_grad_()
        each(inputs_embeds=x, labels=token_ids().cuda()).loss.backward()
        found.append(x.grad)
    assert found[1].norm() > 0 and relative_error(found[0], found[1].double()) <= 1e-2
