"""What the golden cases call: loss, KL, masked mean and configuration checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core import diagnostics, kl, losses, reductions
from grpo_jax.core.batch import Batch, Counts, TokenScores


def setup(dtype):
    """Switch precision for the process; the cases bring arrays of this type."""
    jax.config.update("jax_enable_x64", dtype == "float64")


def build_config(config, params, inputs=None):
    """The package's configuration for a reference one."""
    config = dict(config)
    if config.get("seq_logprob_error_in_loss"):
        config["seq_logprob_error_threshold"] = params.get("seq_logprob_error_threshold")
    # The reference counts positive tokens in each call, and is silent without rewards.
    config["positive_nll_local_count"] = True
    if inputs is not None and "rewards" not in inputs:
        config["positive_example_nll_weight"] = 0.0
    return losses.LossConfig.from_dict(config)


ROWS, LENGTH = 8, 40
"""Every case is padded to one shape with masked rows and tokens, so that each operation is compiled
once and not once a case. Larger cases keep their own shape."""


def _fit(values, first_column, shape, fill=0):
    """Put a case's array into a larger one, from `first_column` on; `fill` everywhere else."""
    values = np.asarray(values)
    out = np.full(shape, fill, values.dtype)
    out[: values.shape[0], first_column : first_column + values.shape[1]] = values
    return jnp.asarray(out)


def build_batch(inputs):
    """A token-aligned batch, and its scores, from a reference case."""
    rows, length = inputs["token_mask"].shape
    shape = (max(rows, ROWS), max(length, LENGTH))
    dtype = inputs["next_token_logprobs"].dtype

    def aligned(name):
        return _fit(inputs[name], 0, shape) if name in inputs else None

    def next_token(name, fill=0):
        return _fit(inputs[name], 1, shape, fill) if name in inputs else None

    def per_row(name):
        if name not in inputs:
            return None
        column = np.asarray(inputs[name], dtype)[:, None]
        return _fit(np.broadcast_to(column, (rows, length)), 0, shape)

    current = next_token("next_token_logprobs")
    support = next_token("policy_support_mask", True)
    if support is not None:
        current = jnp.where(support, current, -jnp.inf)
    mask = np.array(inputs["token_mask"])
    mask[:, 0] = 0  # the reference never reads its first column
    batch = Batch(
        tokens=jnp.zeros(shape, jnp.int32),
        segment_ids=_fit(np.ones((rows, length), np.int32), 0, shape),
        positions=jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape),
        token_mask=_fit(mask, 0, shape),
        sample_weights=per_row("sample_mask"),
        advantages=aligned("advantages"),
        generation_logprobs=aligned("generation_logprobs"),
        prev_logprobs=aligned("prev_logprobs"),
        reference_logprobs=aligned("reference_policy_logprobs"),
        rewards=per_row("rewards"),
    )
    unfiltered = next_token("curr_logprobs_unfiltered")
    return TokenScores(logprobs=current, unfiltered=unfiltered), batch, support is not None


def loss_and_grad(inputs, config, params):
    """One case: loss, gradients and the finished metrics, at the reference's denominators."""
    config = build_config(config, params, inputs)
    scores, batch, filtering_on = build_batch(inputs)
    counts = Counts(
        tokens=jnp.asarray(inputs["global_valid_toks"]),
        sequences=jnp.asarray(inputs["global_valid_seqs"]),
    )

    def loss_fn(scores, config):
        return losses.clipped_pg_loss(scores, batch, counts, config, filtering_on=filtering_on)

    # Eagerly, metrics cost half as much outside the differentiated call.
    minimal = dataclasses.replace(config, metrics_level="minimal")
    grads, _ = jax.grad(loss_fn, has_aux=True)(scores, minimal)
    loss, raw = loss_fn(scores, config)
    metrics = diagnostics.finalize_metrics(raw, counts, config, rescale=False)
    rows, length = inputs["next_token_logprobs"].shape
    found = {"next_token_logprobs": np.asarray(grads.logprobs)[:rows, 1 : 1 + length]}
    if scores.unfiltered is not None:
        found["curr_logprobs_unfiltered"] = np.asarray(grads.unfiltered)[:rows, 1 : 1 + length]
    return {
        "loss": np.asarray(loss),
        "grads": found,
        "metrics": {name: float(value) for name, value in metrics.items()},
    }


def calculate_kl(inputs, config):
    """KL estimates with gradients of their projection."""

    def project(logprobs, weights):
        values = kl.calculate_kl(
            logprobs,
            jnp.asarray(inputs["logprobs_reference"]),
            config["kl_type"],
            input_clamp=config["input_clamp_value"],
            output_clamp=config["output_clamp_value"],
            weights=weights,
        )
        return jnp.sum(jnp.asarray(inputs["proj"]) * values), values

    names = [name for name in inputs if "weight" in name]
    weights = jnp.asarray(inputs[names[0]]) if names else None
    grad = jax.grad(project, argnums=(0,) if weights is None else (0, 1), has_aux=True)
    found, values = grad(jnp.asarray(inputs["logprobs"]), weights)
    result = {"kl": np.asarray(values), "grad_logprobs": np.asarray(found[0])}
    if weights is not None:
        result["grad_weights"] = np.asarray(found[1])
    return result


def masked_mean(inputs, config):
    """Masked mean along one axis or over everything."""
    value = reductions.masked_mean(
        jnp.asarray(inputs["values"]),
        jnp.asarray(inputs["mask"]),
        axis=config["dim"],
        denominator=config["global_normalization_factor"],
    )
    return {"value": np.asarray(value)}


def check_loss_config(config, params):
    """Raises where the configuration must be rejected."""
    build_config(config, params)


def check_kl_config(config):
    """Raises where the KL estimator does not exist."""
    kl.check_kl_type(config["kl_type"])


def config_defaults():
    """Defaults of the loss configuration."""
    return {field.name: field.default for field in dataclasses.fields(losses.LossConfig)}
