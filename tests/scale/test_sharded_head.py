"""The head with its vocabulary over `tensor`: the same numbers, and nothing of size V moves."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.core import logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Policy
from grpo_jax.models.transformer import unembed
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train.step import rows_stay

ROWS, WIDTH, D, V = 8, 12, 16, 2048
NONE = FilterConfig(temperature=0.8)
FILTERS = {
    "off": NONE,
    "ids": NONE,
    "all": FilterConfig(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
    "top_p": FilterConfig(top_p=0.95, vocabulary=V - 9),
}
POLICY = Policy(
    hidden=lambda params, tokens, positions, segments: params["hidden"],
    head=lambda params: params["head"],
    unembed=unembed,
    row_wise_head=True,
)


def draw(dtype):
    rng = np.random.default_rng(0)
    params = {
        "hidden": rng.normal(size=(ROWS, WIDTH, D)).astype(dtype),
        "head": rng.normal(size=(V, D)).astype(dtype),
    }
    tokens = rng.integers(0, V - 9, (ROWS, WIDTH)).astype(np.int32)
    mask = rng.random((ROWS, WIDTH)) < 0.8
    ids = rng.integers(-3, V, (ROWS, WIDTH, 6)).astype(np.int32)
    ids[..., 0] = tokens
    return params, tokens, mask, ids


def score(name, policy, lanes, params, tokens, mask, ids):
    """Scores, and the gradient of a weighted sum of all that carries one."""

    def loss(params):
        scores = logprobs.token_scores(
            policy, params, tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens),
            filter=FILTERS[name], unfiltered=True, entropy=True, kept_mass=True, chunk_size=8,
            lanes=lanes, mask=mask, kept_ids=ids if name == "ids" else None,
        )  # fmt: skip
        finite = jnp.where(scores.logprobs > -jnp.inf, scores.logprobs, 0.0)
        weights = 2 + jnp.cos(jnp.arange(tokens.size, dtype=finite.dtype)).reshape(tokens.shape)
        return jnp.sum(weights * (finite + 0.5 * scores.unfiltered + 0.2 * scores.entropy)), scores

    return jax.value_and_grad(loss, has_aux=True)(params)


def compiled(name, mesh, arguments):
    """Compile for a mesh: rows over data and fsdp, the head's rows over tensor, D over fsdp."""
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    rows = place(("data", "fsdp"))
    homes = {"hidden": rows, "head": place("tensor", "fsdp")}
    step = jax.jit(
        functools.partial(score, name, rows_stay(POLICY, mesh), 4),
        in_shardings=(homes, rows, rows, rows),
        out_shardings=((place(), rows), homes),
    )
    return step.lower(*arguments).compile()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(logprobs, "_VOCABULARY_BLOCK", 256)  # 4 blocks a device


def close(found, wanted, values, gradients):
    (loss, scores), grads = found
    (wanted_loss, wanted_scores), wanted_grads = wanted
    np.testing.assert_allclose(loss, wanted_loss, rtol=values)
    for a, b in zip(scores, wanted_scores, strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * values, atol=10 * values)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        assert np.linalg.norm(a - b) <= gradients * np.linalg.norm(b)


@pytest.mark.parametrize("name", FILTERS)
def test_a_mesh_of_2_by_2_by_2_gives_the_numbers_of_one_device(name, x64):
    arguments = draw(np.float64)
    wanted = jax.jit(functools.partial(score, name, POLICY, 1))(*arguments)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    close(compiled(name, mesh, arguments)(*arguments), wanted, 1e-10, 1e-10)


@pytest.mark.parametrize("name", FILTERS)
def test_in_float32_no_collective_carries_a_row_of_the_vocabulary(name):
    arguments = draw(np.float32)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    program = compiled(name, mesh, arguments)
    assert_nothing_of_the_vocabulary_moves(program.as_text())
    wanted = jax.jit(functools.partial(score, name, POLICY, 1))(*arguments)
    close(program(*arguments), wanted, 1e-6, 1e-5)


def assert_nothing_of_the_vocabulary_moves(text):
    """Only the head itself moves, over fsdp: [V / tensor, D], its weight and its gradient, once."""
    moved = re.findall(
        r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
        r"(?:-start)?\(",
        text,
    )
    assert moved
    wide = []
    for shapes in moved:
        for sizes in re.findall(r"\w+\[([\d,]+)\]", shapes):
            sizes = [int(n) for n in sizes.split(",")]
            if max(sizes) >= V // 8 or np.prod(sizes) >= V:
                wide.append(sizes)
    assert all(sizes == [V // 2, D] for sizes in wide), wide
    assert len(wide) <= 3, wide


def test_the_tpu_compiler_moves_nothing_of_the_vocabulary_either():
    pytest.importorskip("libtpu", reason="needs jax[tpu]: its compiler runs without a TPU")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), devices)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), draw(np.float32))
    for name in ("off", "ids", "all"):
        text = compiled(name, mesh, arguments).as_text()
        assert_nothing_of_the_vocabulary_moves(text)
        assert not re.search(rf"\[[\d,]*\b{V // 2}\]\S* sort\(", text)
