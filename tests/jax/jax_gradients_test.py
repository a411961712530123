"""`tilemoe.jax` against float64: outputs and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_reference as reference
import tilemoe.jax as tilemoe
from jax_values import D, E, K, N, T, cast, compare, lora, values, weights


def routed(dtype="float32", with_addend=False, scoring=None, adapters=None, **options):
    """Compares a layer whose experts are chosen here."""
    static = dict(options)
    biases = static.pop("biases", False)
    of_weights = {key: static[key] for key in ("activation", "gate_layout", "transposed") if key in static}
    inputs = {"x": values(0, T, D), "logits": values(7, T, E), **weights(biases=biases, **of_weights)}
    if with_addend:
        inputs["addend"] = values(8, T, D)
    if adapters is not None:
        inputs["lora"] = adapters
    of_choice = {key: static.pop(key) for key in ("n_group", "topk_group", "group_score") if key in static}
    of_choice |= {} if scoring is None else {"scoring": scoring}
    factor = static.pop("routed_scaling_factor", 1.0)
    bias = static.pop("selection_bias", None)
    logits = jnp.asarray(jnp.asarray(inputs["logits"], dtype), jnp.float32)
    chosen = dict(of_choice, selection_bias=bias, routed_scaling_factor=factor)
    _, ids, _ = tilemoe.top_k(logits, K, **chosen)

    def layer(inputs):
        rest = {name: array for name, array in inputs.items() if name not in ("x", "logits")}
        return tilemoe.moe(inputs["x"], inputs["logits"], K=K, **rest, **static, **chosen)

    def expected(inputs):
        rest = {k: v for k, v in inputs.items() if k not in ("x", "logits", "addend")}
        scores = reference.scores_of(inputs["logits"], ids, scoring or "softmax_over_chosen", factor)
        known = {k: v for k, v in static.items() if k != "column_blocks"}
        y = reference.outputs(inputs["x"], **rest, **known)
        return reference.combined(y, ids, scores, inputs.get("addend"))

    compare(layer, expected, inputs, dtype)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations(activation):
    routed(activation=activation, biases=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gate_layout", ["concatenated", "interleaved", "split"])
def test_layouts(gate_layout, transposed):
    routed(gate_layout=gate_layout, transposed=transposed, biases=True, with_addend=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype):
    routed(dtype, biases=True, with_addend=True)


def test_gpt_oss():
    routed(clamp=0.5, alpha=1.7, up_shift=1.0, gate_layout="interleaved", transposed=True, biases=True)


def test_column_blocks():
    routed(column_blocks=2)


SCORINGS = [
    "softmax_over_chosen", "softmax_over_all", "softmax_renormalized", "sigmoid",
    "sigmoid_renormalized",
]  # fmt: skip


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scorings(scoring):
    routed(scoring=scoring, routed_scaling_factor=2.5)


def test_choice_of_groups():
    """A bias that turns the choice over, and groups, against the rule in numpy."""
    logits, bias = values(3, 40, 8).astype(np.float32), values(4, 8).astype(np.float32)
    how = dict(scoring="sigmoid", selection_bias=jnp.asarray(bias), n_group=4, topk_group=2)
    scores, ids, counts = tilemoe.top_k(jnp.asarray(logits), 3, **how)
    ranked = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    groups = np.sort(ranked.reshape(40, 4, 2), -1).sum(-1)  # the sum of two
    best = np.argsort(-groups, -1)[:, :2]
    allowed = (np.arange(8)[None, :, None] // 2 == best[:, None]).any(-1)
    expected = np.argsort(-np.where(allowed, ranked, -np.inf), -1)[:, :3]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(counts, np.bincount(expected.ravel(), minlength=8))
    np.testing.assert_allclose(scores, np.take_along_axis(ranked - bias, expected, 1), rtol=1e-5)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores_of_given_ids(scoring):
    logits = values(5, T, E)
    order = np.random.default_rng(6)
    ids = np.stack([order.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    compare(
        lambda a: tilemoe.top_k_scores(a["logits"], jnp.asarray(ids), scoring=scoring),
        lambda a: reference.scores_of(a["logits"], ids, scoring),
        {"logits": logits},
    )


def test_given_experts():
    """Ids outside [0, E) are skipped, also if a token has more of them than there are experts."""
    ids = np.random.default_rng(2).integers(-2, E + 2, (T, E + 2))
    ids = np.where(np.arange(E + 2) < 2, ids, -1 - (ids % 3))  # at most two of [0, E)
    inputs = {"x": values(0, T, D), "scores": values(7, T, E + 2), **weights()}

    def layer(a):
        return tilemoe.moe(a["x"], a["scores"], a["W1"], a["W2"], ids=jnp.asarray(ids))

    def expected(a):
        return reference.combined(reference.outputs(a["x"], a["W1"], a["W2"]), ids, a["scores"])

    compare(layer, expected, inputs)


@pytest.mark.parametrize("with_scores", [False, True])
def test_grouped(with_scores):
    counts = [4, 0, 5, 1, 0]
    inputs = {"rows": values(0, T, D), **weights(biases=True)}
    if with_scores:
        inputs["row_scores"] = values(3, T)

    def layer(a):
        return tilemoe.grouped_experts(a.pop("rows"), jnp.asarray(counts), **a)

    def expected(a):
        return reference.grouped(a.pop("rows"), counts, **a)

    compare(lambda a: layer(dict(a)), lambda a: expected(dict(a)), inputs)


@pytest.mark.parametrize(
    "how",
    [
        dict(adapters=lora()),
        dict(adapters=lora((8, 0), scale=0.25), transposed=True),
        dict(adapters=lora((0, 3))),  # padded
        dict(adapters=lora((8, 8), rows=N, up_rank=16), gate_layout="split", biases=True),
    ],
    ids=["both", "W1", "padded", "split"],
)
def test_adapters(how):
    routed(**how)


def test_adapters_in_16_bits():
    routed("bfloat16", adapters=lora((8, 8), scale=0.5))


def test_float32_weights():
    """A bfloat16 layer with float32 weights: dW has more bits than bfloat16."""
    inputs = cast({"x": values(0, T, D), "logits": values(7, T, E)}, jnp.bfloat16)
    made = cast(weights(biases=True), jnp.float32)

    def loss(x, logits, W):
        return tilemoe.moe(x, logits, K=K, **W).astype(jnp.float32).sum()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(inputs["x"], inputs["logits"], made)
    assert grads[0].dtype == grads[1].dtype == jnp.bfloat16
    narrow = cast(made, jnp.bfloat16)
    of_narrow = jax.jit(jax.grad(loss, argnums=2))(inputs["x"], inputs["logits"], narrow)
    for name, gradient in grads[2].items():
        assert gradient.dtype == jnp.float32
        assert (gradient != gradient.astype(jnp.bfloat16)).any(), f"d{name} was rounded"
        np.testing.assert_array_equal(gradient.astype(jnp.bfloat16), of_narrow[name])


def test_router_losses():
    logits, mask = values(3, T, E, scale=2.0), np.arange(T) % 4 != 0
    _, _, counts = tilemoe.top_k(jnp.asarray(logits[mask], jnp.float32), K)

    def expected(a):
        rows = a["logits"][np.flatnonzero(mask)]
        p = jax.nn.softmax(rows, -1).mean(0)
        balance = E * (counts / counts.sum() * p).sum()
        return jnp.stack([balance, (jax.nn.logsumexp(rows, -1) ** 2).mean()])

    def losses(a):
        return jnp.stack(tilemoe.router_losses(a["logits"], counts, jnp.asarray(mask)))

    compare(losses, expected, {"logits": logits})


def test_leading_dimensions_and_no_tokens():
    W = cast(weights(), jnp.float32)
    x, logits = jnp.ones((2, 3, D)), jnp.ones((2, 3, E))
    one = tilemoe.moe(x.reshape(6, D), logits.reshape(6, E), **W, K=K)
    np.testing.assert_array_equal(tilemoe.moe(x, logits, **W, K=K), one.reshape(2, 3, D))
    scores, ids, _ = tilemoe.top_k(logits, K)
    assert scores.shape == ids.shape == (2, 3, K)

    def loss(x, W):
        return tilemoe.moe(x, jnp.zeros((0, E)), **W, K=K).sum()

    dx, dW = jax.grad(loss, argnums=(0, 1))(jnp.zeros((0, D)), W)
    assert dx.shape == (0, D) and not any(g.any() for g in dW.values())


def test_capacity_and_counts():
    W, x = cast(weights(), jnp.float32), jnp.asarray(values(0, T, D), jnp.float32)
    ids = np.random.default_rng(2).integers(-1, E, (T, 2))
    ids[3] = -1
    scores, call = jnp.ones((T, 2)), lambda **how: tilemoe.moe(
        x, scores, **W, ids=jnp.asarray(ids), return_aux=True, **how
    )
    O, aux = call()
    there = ids >= 0
    np.testing.assert_array_equal(aux.expert_counts, np.bincount(ids[there], minlength=E))
    assert aux.skipped == (~there).sum() and aux.overflow == 0
    assert aux.without == (~there.any(1)).sum() > 0
    rows = int(there.sum()) - 2
    assert jnp.isnan(call(capacity=rows)[0]).all()
    dropped, aux = call(capacity=rows, on_overflow="drop")
    assert aux.overflow == 2 and aux.skipped == (~there).sum() + 2
    assert 0 < (dropped != O).any(1).sum() <= 2
    np.testing.assert_array_equal(call(capacity=rows + 2)[0], O)
