"""Models of the user's own through the ordinary train step: the same numbers behind each door."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core import masks
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.core.policy import policy_from_apply
from grpo_jax.models.adapters import policy_from_linen, policy_from_nnx
from grpo_jax.train import optimizer, state, step
from grpo_jax.train.optimizer import OptimizerConfig
from tests.models.test_adapters import LinenBigram, NnxBigram, nnx
from tests.train.test_step import make_batch

V = 12
LOSS = LossConfig(reference_policy_kl_penalty=0.0, metrics_level="minimal")
OPTIMIZER = optimizer.build_optimizer(OptimizerConfig(lr=0.05, weight_decay=0.0), 10)


def train(policy, params) -> tuple[list[float], list[float], np.ndarray]:
    """Three steps: losses, gradient norms, and the one table that was trained."""
    run = step.make_train_step(policy, OPTIMIZER, LOSS, FilterConfig())
    made = state.create(params, OPTIMIZER.transform)
    batch = make_batch(vocabulary=V)
    losses, norms = [], []
    for _ in range(3):
        made, metrics = run(made, batch, masks.count(batch))
        assert float(metrics["update_applied"]) == 1
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    (table,) = jax.tree.leaves(made.params)
    return losses, norms, np.asarray(table)


def test_three_doors_train_one_model_alike():
    """A bigram as NNX, Linen and a plain function, from the same table, three updates each."""
    policy, params = policy_from_nnx(NnxBigram(V, nnx.Rngs(0)))
    table = jnp.array(params["table"]["embedding"])
    found = [train(policy, params)]
    constants = {"constants": {"shift": jnp.float32(0.5)}}
    linen = policy_from_linen(LinenBigram(V), constants=constants)
    found.append(train(linen, {"Embed_0": {"embedding": table}}))
    plain = policy_from_apply(lambda params, tokens, *_: params["table"][tokens] + 0.5)
    found.append(train(plain, {"table": table}))
    losses, norms, trained = found[0]
    assert losses[2] < losses[0] and min(norms) > 0
    assert np.abs(trained - table).max() > 0.05  # lr 0.05 for three updates
    for others in found[1:]:
        np.testing.assert_allclose(others[0], losses, rtol=1e-5)
        np.testing.assert_allclose(others[1], norms, rtol=1e-5)
        np.testing.assert_allclose(others[2], trained, atol=1e-5)
