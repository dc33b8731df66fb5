"""Denominators known only after filtering: any cut over micro-batches and devices is the whole.

Gates that drop tokens or sequences, both reductions, with and without a KL term, in double
precision; 1e-12 leaves room for another order of summation only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import evaluate, evaluate_small, random_case

from grpo_jax.core import diagnostics, losses, masks
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")


def gate(kind, low, high):
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


GATES = {
    "tis": gate("tis", 0.9, 1.1),
    "icepop": gate("icepop", 0.85, 1.1),
    "seq-mask-tis": gate("seq-mask-tis", 0.97, 1.03),
    "geo-rs": gate("geo-rs", 0.97, 1.03),
    "product-rs": gate("product-rs", 0.9, 1.2),
    "veto": {"token_veto_threshold": 0.75},
}
REDUCTIONS = {"token": {}, "sequence": {"token_level_loss": False}}


def config_of(name, reduction, beta=0.0, **options):
    return LossConfig(
        truncated_is_normalization="survivors",
        use_importance_sampling_correction=True,
        reference_policy_kl_penalty=beta,
        **GATES[name],
        **REDUCTIONS[reduction],
        **options,
    )


def parts_of(tree, cuts):
    return [jax.tree.map(lambda x, a=a, b=b: x[a:b], tree) for a, b in cuts]


CUTS = ([(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", GATES)
def test_micro_batches_have_the_denominator_of_the_whole(name, reduction):
    """Without KL one factor at the end; with KL the survivors are counted before.

    The numbers themselves are N / K times those of the `batch` mode, up to the 1e-8 that every
    denominator carries.
    """
    for beta, support in ((0.0, False), (0.1, True)):
        scores, batch = random_case(3, support=support)
        config, counts = config_of(name, reduction, beta), masks.count(batch)
        options = {"filtering_on": support}
        loss, grads = in_parts([(0, 4)], scores, batch, config, counts, **options)
        left = losses.survivor_counts(scores, batch, config, **options)
        wanted = by_hand(scores, batch, config, left, counts, **options)
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-7)
        for ours, theirs in zip(grads, wanted[1], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-12)
        for cuts in CUTS:
            found = in_parts(cuts, scores, batch, config, counts, **options)
            np.testing.assert_allclose(found[0], loss, rtol=1e-12)
            for ours, theirs in zip(found[1], grads, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-15)


def in_parts(cuts, scores, batch, config, counts, **options):
    """Loss and gradient of a batch that is cut into micro-batches, as a train step does it.

    Rows of padding fill each of them to one shape, so that eager operations compile once.
    """
    pad = lambda x: jnp.pad(x, ((0, 4 - x.shape[0]), (0, 0)))  # noqa: E731
    pieces = [jax.tree.map(pad, piece) for piece in parts_of((scores, batch), cuts)]
    if config.kl_on:
        own = [losses.survivor_counts(*piece, config, **options) for piece in pieces]
        counts = counts._replace(survivors=jax.tree.map(lambda *x: sum(x), *own))
    total, grads, raw = 0.0, [], None
    for piece, (start, stop) in zip(pieces, cuts, strict=True):
        loss, grad, metrics = raw_loss(*piece, counts, config, **options)
        total += loss
        grads.append(jax.tree.map(lambda g, n=stop - start: g[:n], grad))
        raw = metrics if raw is None else diagnostics.merge_metrics(raw, metrics)
    scale = diagnostics.gradient_scale(raw, counts, config)
    joined = jax.tree.map(lambda *x: jnp.concatenate(x) * scale, *grads)
    return total * scale, joined


def raw_loss(scores, batch, counts, config, **options):
    def loss_fn(scores):
        return losses.clipped_pg_loss(scores, batch, counts, config, **options)

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(scores)
    return loss, grads, metrics


def by_hand(scores, batch, config, left, counts, **options):
    """N / K times the actor part of the `batch` mode, plus its KL part untouched."""
    total = counts.tokens if config.token_level_loss else counts.sequences
    names = {f: getattr(config, f) for f in ("token_level_loss", *SHARED)}
    beta = names.pop("reference_policy_kl_penalty")
    actor = LossConfig(**names, reference_policy_kl_penalty=0.0)
    loss, grads, _ = raw_loss(scores, batch, counts, actor, **options)
    loss, grads = jax.tree.map(lambda x: x * total / left.actor, (loss, grads))
    if beta:
        still = batch.replace(advantages=jnp.zeros_like(batch.advantages))
        kl = LossConfig(token_level_loss=config.token_level_loss, reference_policy_kl_penalty=beta)
        more, more_grads, _ = raw_loss(scores, still, counts, kl, **options)
        loss, grads = loss + more, jax.tree.map(jnp.add, grads, more_grads)
    return loss, grads


SHARED = (
    "reference_policy_kl_penalty",
    "use_importance_sampling_correction",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "token_veto_threshold",
)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", GATES)
def test_survivors_counted_in_plain_loops(name, reduction):
    """K from nested loops over sequences and tokens; weights are fractional."""
    scores, batch = random_case(3, support=False)
    wanted = 0.0
    for i in range(4):
        on, m_s = np.asarray(batch.token_mask[i]), float(batch.sample_weights[i, 0])
        v = np.exp(np.asarray(batch.prev_logprobs - batch.generation_logprobs)[i][on])
        mean, product = np.prod(v) ** (1 / len(v)), np.prod(v)
        kept = {
            "tis": np.ones(len(v), bool),
            "icepop": (v >= 0.85) & (v <= 1.1),
            "seq-mask-tis": np.full(len(v), 0.97 <= mean <= 1.03),
            "geo-rs": np.full(len(v), 0.97 <= mean <= 1.03),
            "product-rs": np.full(len(v), 0.9 <= product <= 1.2),
            "veto": np.full(len(v), v.min() >= 0.75),
        }[name]
        wanted += m_s * (kept.sum() if reduction == "token" else float(kept.any()))
    counts = masks.count(batch)
    total = counts.tokens if reduction == "token" else counts.sequences
    found = losses.survivor_counts(None, batch, config_of(name, reduction))
    np.testing.assert_allclose(found.actor, wanted, rtol=1e-12)
    np.testing.assert_allclose(found.rest, total, rtol=1e-12)
    assert wanted < total or name == "tis" or (name, reduction) == ("icepop", "sequence")
    metrics = evaluate_small(scores, batch, config_of(name, reduction))[2]
    unit = "tokens" if reduction == "token" else "sequences"
    np.testing.assert_allclose(metrics[f"survivor_{unit}"], wanted, rtol=1e-12)
    np.testing.assert_allclose(metrics["gradient_scale"], total / wanted, rtol=1e-7)


ON_DEVICES = [
    ("icepop", "token", {}),
    ("seq-mask-tis", "sequence", {}),
    ("product-rs", "token", {}),
    ("veto", "sequence", {}),
    ("geo-rs", "token", {"force_on_policy_ratio": True}),
]


@pytest.mark.parametrize(("name", "reduction", "options"), ON_DEVICES)
def test_devices_with_micro_batches_have_the_denominator_of_the_whole(name, reduction, options):
    """Two devices walk two micro-batches each; survivors are added over both, then differentiated.

    On-policy the gates read the current policy: the counts come from the same scores.
    """
    scores, batch = random_case(3)
    config, counts = config_of(name, reduction, 0.1, **options), masks.count(batch)
    left = losses.survivor_counts(scores, batch, config, filtering_on=True)
    given = counts._replace(survivors=left)
    wanted = evaluate(scores, batch, config, given, filtering_on=True)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def local(scores, batch):
        pieces = parts_of((scores, batch), [(0, 1), (1, 2)])
        own = [losses.survivor_counts(*p, config, filtering_on=True) for p in pieces]
        own = losses.Survivors(*jax.lax.psum(jax.tree.map(lambda *x: sum(x), *own), "data"))
        used = counts._replace(survivors=jax.lax.stop_gradient(own))
        parts = [losses.clipped_pg_loss(*p, used, config, filtering_on=True)[0] for p in pieces]
        return jax.lax.psum(sum(parts), "data")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=whole)
    loss, grads = jax.jit(jax.value_and_grad(sharded))(scores, batch)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-12)
    for ours, theirs in zip(grads, wanted[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-15)
    assert float(jnp.abs(grads.logprobs).max()) > 1e-3
