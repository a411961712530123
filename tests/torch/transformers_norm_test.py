"""Experts of transformers with a norm of each expert's output: what is kept for backward, and what
is refused. transformers_test.py compares the classes that have one."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import tilemoe.transformers
from checks import compiled, refused
from comparison import Limits, assert_close
from tilemoe.integrations import transformers as of_transformers
from transformers_forms_test import Plain
from transformers_support import E, K, T, build, d, fill, problem, run, run_eager

LIMITS = Limits(1e-5, 1e-4, 1e-2)  # larger than float32's: a norm divides by what may be small
NORMS = {
    "RMSNorm": lambda: torch.nn.RMSNorm(d, eps=1e-6),
    "LayerNorm": lambda: torch.nn.LayerNorm(d),
    "without weights": lambda: torch.nn.RMSNorm(d, elementwise_affine=False),
}


class WithNorm(Plain):
    def after(self, Y, expert):
        return self.post_expert_norm(Y)


class WithUnusedNorm(Plain):
    """Its forward does not call the norm that it has."""


@pytest.fixture(autouse=True, scope="module")
def registered():
    tilemoe.transformers.register()


def with_norm(cls=WithNorm, norm="RMSNorm"):
    module = cls(build(MixtralExperts).config)
    module.has_post_expert_norm = True  # what the decorator sets from transformers 5.24 on
    module.post_expert_norm = NORMS[norm]()
    module.config._experts_implementation = "tilemoe"
    return fill(module)


@pytest.mark.parametrize("sentinels", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_output_and_gradients_are_those_of_its_forward(norm, sentinels):
    module = with_norm(norm=norm)
    data = problem(sentinels=sentinels)
    got, want = run(module, *data), run_eager(module, *data)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] is not None, f"{name} is missing"
        whole = (1, -1) if name == "d top_k_weights" else want[name].shape
        assert_close(got[name].reshape(whole), want[name].reshape(whole), name, LIMITS)


def test_inference_has_the_bits_of_training():
    module = with_norm().bfloat16()
    x, ids, scores, _ = problem()
    want = module(x.bfloat16(), ids, scores)
    assert want.requires_grad
    with torch.no_grad():
        assert torch.equal(module(x.bfloat16(), ids, scores), want)


def test_a_forward_that_does_not_call_the_norm_is_refused():
    x, ids, scores, _ = problem()
    module = with_norm(WithUnusedNorm)
    refused(NotImplementedError, "its own forward differ by", module, x, ids, scores)


def test_a_flag_without_a_norm_is_refused():
    module = with_norm()
    del module.post_expert_norm
    x, ids, scores, _ = problem()
    refused(NotImplementedError, "flag has_post_expert_norm", module, x, ids, scores)


def test_training_keeps_the_rows_of_both_gemms():
    """H (M, 2n), A (M, n) and Y (M, d) of float32, and 100 bytes for a pair."""
    module = with_norm()
    tokens, of_d, of_n = 700, module.down_proj.shape[1], module.down_proj.shape[2]
    x = torch.randn(tokens, of_d).requires_grad_()
    ids = torch.rand(tokens, E).argsort(-1)[:, :K]
    scores = torch.rand(tokens, K).requires_grad_()
    module(x[:T], ids[:T], scores[:T])  # the form is found
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        out = module(x, ids, scores)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    kept = sum(e.nbytes() for e in events) - out.nbytes
    M = tokens * K
    rows = 4 * M * (2 * of_n + of_n + of_d)
    assert rows <= kept <= rows + 100 * M


def test_it_compiles_in_one_graph():
    module = with_norm()
    x, ids, scores, _ = problem()
    want = module(x, ids, scores)
    assert torch.equal(compiled(module)(x, ids, scores), want)


def test_what_the_functions_lack_is_refused(monkeypatch):
    module = with_norm()
    x, ids, scores, _ = problem()
    sentence = "does not support {} for WithNorm: its post_expert_norm .* tilemoe.gathered_mm"
    elsewhere = lambda *args, **options: None
    refused(
        NotImplementedError, sentence.format("expert parallelism"), of_transformers.computed,
        elsewhere, module, x, ids, scores,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(of_transformers, "lora_of", lambda *args: object())
        refused(NotImplementedError, sentence.format("adapters"), module, x, ids, scores)
    narrow = tilemoe.quantize_experts(torch.ones(E, 32, 64), "nf4")
    with monkeypatch.context() as patch:
        patch.setattr(of_transformers, "_weight", lambda *args: narrow)
        refused(NotImplementedError, sentence.format("quantised weights"), module, x, ids, scores)
