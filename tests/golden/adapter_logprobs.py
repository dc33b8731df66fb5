"""Our log-probabilities behind the interface of the conformance checker.

Cases are padded to a few shapes, so that a configuration is compiled once; padded vocabulary holds
-inf and is never kept, padded tokens are segment 0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core import logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Policy

CHUNK_SIZE = None  # None: whole logits; a number: the chunked path
_ROWS, _WIDTH = 3, 6
_LOGITS = Policy(  # its parameters are its logits, which keep their precision
    hidden=lambda params, tokens, positions, segments: params,
    head=lambda params: (),
    unembed=lambda head, hidden: hidden,
)


def setup(dtype):
    """Switch the precision of the process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", dtype == "float64")


# Tiny programs, run once each: compiling them well would take four times as long.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, static_argnames=("filter", "chunk_size"), compiler_options=_QUICK)
def _scores_and_gradients(logits, ids, segments, proj, filter, chunk_size):
    positions = jnp.zeros_like(ids)

    def score(logits):
        scores = logprobs.token_scores(
            _LOGITS, logits, ids, positions, segments,
            filter=filter, unfiltered=True, chunk_size=chunk_size,
        )  # fmt: skip
        return scores.logprobs, scores.unfiltered

    (filtered, unfiltered), pull = jax.vjp(score, logits)
    nothing = jnp.zeros_like(proj)
    (d_filtered,) = pull((proj, nothing))
    (d_unfiltered,) = pull((nothing, proj))
    return filtered, d_filtered, unfiltered, d_unfiltered


def next_token_logprobs(inputs, config):
    """Return filtered and unfiltered log-probabilities [B, T-1] and their gradients [B, T, V]."""
    rows, width, vocabulary = inputs["logits"].shape
    size = 32 if vocabulary <= 32 else 1024
    logits = np.full((_ROWS, _WIDTH, size), -np.inf, inputs["logits"].dtype)
    logits[:rows, :width, :vocabulary] = inputs["logits"]
    ids, segments = np.zeros((2, _ROWS, _WIDTH), np.int32)
    ids[:rows, :width], segments[:rows, :width] = inputs["input_ids"], 1
    proj = np.zeros((_ROWS, _WIDTH), logits.dtype)
    proj[:rows, 1:width] = inputs["proj"]
    filter = FilterConfig(config["temperature"], config["top_k"], config["top_p"])
    out = _scores_and_gradients(logits, ids, segments, proj, filter, CHUNK_SIZE)
    filtered, d_filtered, unfiltered, d_unfiltered = (np.asarray(x)[:rows, :width] for x in out)
    return {
        "logprobs": filtered[:, 1:],
        "grad": d_filtered[..., :vocabulary],
        "logprobs_unfiltered": unfiltered[:, 1:],
        "grad_unfiltered": d_unfiltered[..., :vocabulary],
    }
