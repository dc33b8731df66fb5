"""Temporaries that the compiler plans for the head at full size; compiled, never run."""

import functools

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.core import lanes, logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Policy
from grpo_jax.models.transformer import unembed

ROWS, WIDTH, D, V = 4, 1024, 1024, 151_936
FULL = ROWS * WIDTH * V * 4  # bytes of all logits in float32: 2.3 GiB
ALL = FilterConfig(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
POLICY = Policy(
    hidden=lambda params, tokens, positions, segments: params["hidden"],
    head=lambda params: params["head"],
    unembed=unembed,
    row_wise_head=True,
)


def planned(filter, chunk_size, places=None, everything=False):
    """Bytes beside inputs, value and gradients, as a fraction of the logits."""

    def loss(params, tokens):
        scores = logprobs.token_scores(
            POLICY, params, tokens, tokens, tokens, filter=filter, chunk_size=chunk_size,
            unfiltered=everything, entropy=everything, kept_mass=everything,
        )  # fmt: skip
        return sum(jnp.sum(x) for x in scores if x is not None)

    shape = functools.partial(jax.ShapeDtypeStruct, sharding=places)
    params = {
        "hidden": shape((ROWS, WIDTH, D), jnp.float32),
        "head": shape((V, D), jnp.float32),
    }
    step = jax.jit(jax.value_and_grad(loss))
    compiled = step.lower(params, shape((ROWS, WIDTH), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / FULL


@pytest.mark.parametrize(
    ("filter", "chunk_size", "everything"),
    [
        (FilterConfig(), "auto", True),  # 96 tokens
        (FilterConfig(top_p=0.95), "auto", False),
        (ALL, 64, True),
    ],
    ids=["off", "top_p", "all"],
)
def test_the_head_needs_less_than_a_twelfth_of_its_logits(filter, chunk_size, everything):
    assert planned(filter, chunk_size, everything=everything) <= 0.08


def test_auto_is_a_share_of_the_tokens_between_two_bounds():
    found = {n: lanes.chunk_length("auto", n) for n in (7, 96, 2048, 4096, 6000, 65_536)}
    assert found == {7: 7, 96: 96, 2048: 128, 4096: 96, 6000: 128, 65_536: 512}
    assert lanes.chunk_length(1000, 64) == 64


def test_the_logits_themselves_are_what_the_whole_path_needs():
    assert planned(FilterConfig(), None) > 1.5  # so the figures above can fail


def test_the_tpu_compiler_plans_less_than_a_twelfth_too():
    pytest.importorskip("libtpu", reason="needs jax[tpu]: its compiler runs without a TPU")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    places = jax.sharding.SingleDeviceSharding(devices[0])
    # At its default precision the compiler also keeps a bfloat16 copy of a float32 head (12.5 %).
    with jax.default_matmul_precision("highest"):
        assert planned(FilterConfig(), 128, places) <= 0.05
        assert planned(ALL, 128, places, everything=True) <= 0.08
