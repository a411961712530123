"""Experts and tokens spread over four devices, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilemoe.jax as tilemoe
from jax_values import cast, values

RANKS, T, D, N, E, K = 4, 16, 24, 16, 8, 3


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((RANKS,), ("ranks",), axis_types=(AxisType.Auto,))


def inputs(dtype=jnp.float32):
    return cast(
        {
            "x": values(0, T, D),
            "router": values(1, D, E, scale=D**-0.5),
            "W1": values(2, E, 2 * N, D, scale=D**-0.5),
            "W2": values(3, E, D, N, scale=N**-0.5),
        },
        dtype,
    )


def one_device(a):
    return tilemoe.moe(a["x"], a["x"] @ a["router"], a["W1"], a["W2"], K=K)


def gathered(a):
    """Every device has all tokens, and computes its own experts'."""
    scores, ids, _ = tilemoe.top_k(a["x"] @ a["router"], K)
    x, scores, ids = (jax.lax.all_gather(b, "ranks", tiled=True) for b in (a["x"], scores, ids))
    local = ids - jax.lax.axis_index("ranks") * a["W1"].shape[0]  # others' are skipped
    O = tilemoe.moe(x, scores, a["W1"], a["W2"], ids=local)
    return jax.lax.psum_scatter(O, "ranks", tiled=True)


def exchanged(a):
    """Each device receives the rows of its experts, in parts of the worst case."""
    here, (T_, d) = a["W1"].shape[0], a["x"].shape
    scores, ids, _ = tilemoe.top_k(a["x"] @ a["router"], K)
    rank, slots = (ids // here).ravel(), T_ * K
    order = jnp.argsort(rank, stable=True)
    place = jnp.arange(slots) - jnp.searchsorted(rank[order], rank[order])
    at = jnp.zeros(slots, jnp.int32).at[order].set(rank[order] * slots + place)  # of each pair
    send = jnp.zeros((RANKS * slots, d), a["x"].dtype).at[at].set(jnp.repeat(a["x"], K, 0))
    experts = jnp.full(RANKS * slots, E).at[at].set(ids.ravel())
    exchange = functools.partial(jax.lax.all_to_all, axis_name="ranks", split_axis=0, concat_axis=0, tiled=True)
    rows, experts = exchange(send), exchange(experts) - jax.lax.axis_index("ranks") * here
    experts = jnp.where((experts >= 0) & (experts < here), experts, here)
    sort = jnp.argsort(experts, stable=True)
    counts = jnp.bincount(experts, length=here + 1)[:here]
    made = tilemoe.grouped_experts(rows[sort], counts, a["W1"], a["W2"])
    back = exchange(jnp.zeros_like(made).at[sort].set(made))
    return (scores[..., None] * back[at].reshape(T_, K, d)).sum(1)


SPECS = {"x": P("ranks"), "router": P(), "W1": P("ranks"), "W2": P("ranks")}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layer", [gathered, exchanged])
def test_expert_parallel(layer, check_vma, mesh):
    a = inputs()
    spread = jax.shard_map(layer, mesh=mesh, in_specs=(SPECS,), out_specs=P("ranks"), check_vma=check_vma)
    loss = lambda function: lambda a: jnp.sin(function(a)).sum()
    on_mesh = {name: jax.device_put(array, NamedSharding(mesh, SPECS[name])) for name, array in a.items()}
    found, gradients = jax.jit(jax.value_and_grad(loss(spread)))(on_mesh)
    expected, of_one = jax.jit(jax.value_and_grad(loss(one_device)))(a)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name in a:
        np.testing.assert_allclose(gradients[name], of_one[name], rtol=1e-4, atol=1e-5, err_msg=name)
    if layer is gathered:  # each device sums its own experts; their sum is exact in any order here
        whole = jax.tree.map(jnp.round, a)
        np.testing.assert_allclose(jax.jit(spread)(whole), jax.jit(one_device)(whole), rtol=1e-5, atol=1e-6)


def test_data_parallel(mesh):
    """Replicated weights: their gradient is summed over the devices."""
    a = inputs()
    specs = {name: P("ranks") if name == "x" else P() for name in a}
    spread = jax.shard_map(one_device, mesh=mesh, in_specs=(specs,), out_specs=P("ranks"))
    np.testing.assert_allclose(jax.jit(spread)(a), jax.jit(one_device)(a), rtol=1e-4, atol=1e-6)
    gradients = jax.jit(jax.grad(lambda a: jnp.sin(spread(a)).sum()))(a)
    expected = jax.jit(jax.grad(lambda a: jnp.sin(one_device(a)).sum()))(a)
    for name in a:
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_adapters_and_losses(mesh):
    a = inputs()
    lora = tilemoe.LoRA(
        A2=jnp.asarray(values(5, E, 8, N), jnp.float32), B2=jnp.asarray(values(6, E, D, 8), jnp.float32)
    )

    def layer(a, lora):
        logits = a["x"] @ a["router"]
        O, aux = tilemoe.moe(a["x"], logits, a["W1"], a["W2"], K=K, lora=lora, return_aux=True)
        balance, z = tilemoe.router_losses(logits, aux.expert_counts)
        return O, jax.lax.pmean(balance + z, "ranks")

    specs = {name: P("ranks") if name == "x" else P() for name in a}
    spread = jax.shard_map(layer, mesh=mesh, in_specs=(specs, P()), out_specs=(P("ranks"), P()))
    gradients = jax.jit(jax.grad(lambda a, l: sum(map(jnp.sum, spread(a, l))), argnums=(0, 1)))(a, lora)
    assert all(g.any() for g in jax.tree.leaves(gradients))


def test_explicit_axes():
    mesh = jax.make_mesh((RANKS,), ("ranks",), axis_types=(AxisType.Explicit,))
    a = inputs()
    with jax.set_mesh(mesh):
        a["W1"] = jax.device_put(a["W1"], NamedSharding(mesh, P("ranks")))
        with pytest.raises(ValueError, match="W1 is sharded.*jax.shard_map"):
            jax.jit(one_device)(a)


def test_threads_of_devices():
    """Programs on four devices at a time, with the bits of one."""
    a = inputs()
    step = jax.jit(jax.grad(lambda a: jnp.sin(one_device(a)).sum()))
    expected = step(a)
    found = [step(jax.device_put(a, device)) for device in jax.devices() for _ in range(3)]
    for gradients in found:
        jax.tree.map(np.testing.assert_array_equal, gradients, expected)
