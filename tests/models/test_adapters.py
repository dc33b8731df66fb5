"""Models of the user's own, in both Flax interfaces, behind the same door."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from grpo_jax.models import adapters


class NnxBigram(nnx.Module):
    def __init__(self, vocab: int, rngs: nnx.Rngs):
        self.table = nnx.Embed(vocab, vocab, rngs=rngs)
        self.shift = nnx.Variable(jnp.float32(0.5))  # not a parameter
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, tokens, positions, segment_ids):
        self.calls[...] += 1
        return self.table(tokens) + self.shift[...]


class LinenBigram(nn.Module):
    vocab: int

    @nn.compact
    def __call__(self, tokens, positions, segment_ids):
        shift = self.variable("constants", "shift", lambda: jnp.float32(0.0))
        return nn.Embed(self.vocab, self.vocab)(tokens) + shift.value

    def just_tokens(self, tokens, positions, segment_ids):
        return self(tokens, positions, segment_ids) * 2.0


BATCH = tuple(jnp.asarray(x, jnp.int32) for x in ([[1, 2, 0]], [[0, 1, 2]], [[1, 1, 0]]))


def logits_of(policy, params):
    return policy.unembed(policy.head(params), policy.hidden(params, *BATCH))


def test_nnx_module_becomes_policy_and_plain_parameters():
    module = NnxBigram(5, nnx.Rngs(0))
    policy, params = adapters.policy_from_nnx(module)
    table = module.table.embedding[...]
    assert jax.tree.map(jnp.shape, params) == {"table": {"embedding": (5, 5)}}
    found = jax.jit(lambda p: logits_of(policy, p))(params)
    np.testing.assert_allclose(found, table[BATCH[0]] + 0.5, rtol=1e-6)
    gradient = jax.grad(lambda p: logits_of(policy, p).sum())(params)
    np.testing.assert_array_equal(gradient["table"]["embedding"].sum(1), [5.0, 5.0, 5.0, 0, 0])
    assert module.calls[...] == 0  # the module that was handed in stays as it was


def test_nnx_module_with_other_arguments():
    policy, params = adapters.policy_from_nnx(
        nnx.Embed(5, 5, rngs=nnx.Rngs(0)), call=lambda m, tokens, positions, ids: m(tokens)
    )
    np.testing.assert_array_equal(logits_of(policy, params), params["embedding"][BATCH[0]])


def test_nnx_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="Dropout has no nnx.Param"):
        adapters.policy_from_nnx(nnx.Dropout(0.5))


def test_linen_module_becomes_policy():
    module = LinenBigram(5)
    variables = module.init(jax.random.key(0), *BATCH)
    table = variables["params"]["Embed_0"]["embedding"]
    constants = {"constants": {"shift": jnp.float32(0.25)}}
    policy = adapters.policy_from_linen(module, constants=constants)
    found = jax.jit(lambda p: logits_of(policy, p))(variables["params"])
    np.testing.assert_allclose(found, table[BATCH[0]] + 0.25, rtol=1e-6)
    doubled = adapters.policy_from_linen(module, constants=constants, method="just_tokens")
    np.testing.assert_allclose(logits_of(doubled, variables["params"]), 2 * found, rtol=1e-6)
    called = adapters.policy_from_linen(
        module, constants=constants, call=lambda bound, *batch: bound(*batch) - 0.25
    )
    np.testing.assert_allclose(
        logits_of(called, variables["params"]), table[BATCH[0]], rtol=0, atol=1e-6
    )


def test_linen_parameters_are_not_constants():
    with pytest.raises(ValueError, match='constants holds "params"'):
        adapters.policy_from_linen(LinenBigram(5), constants={"params": {}})
    with pytest.raises(ValueError, match="either method or call"):
        adapters.policy_from_linen(LinenBigram(5), method="x", call=lambda *a: a)
