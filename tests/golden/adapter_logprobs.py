"""Our log-probabilities behind the interface of the conformance checker.

Cases are padded to one shape and evaluated operation by operation, which is faster than compiling a
program for each; padded vocabulary holds -inf and is never kept, padded tokens are segment 0.
"""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core import filtering, logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Policy

CHUNK_SIZE = None  # None: whole logits; a number: the chunked path
_ROWS, _WIDTH, _VOCABULARY = 3, 6, 1024
_LOGITS = Policy(  # its parameters are its logits, which keep their precision
    hidden=lambda params, tokens, positions, segments: params,
    head=lambda params: (),
    unembed=lambda head, hidden: hidden,
)


def setup(dtype):
    """Switch the precision of the process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", dtype == "float64")


def _scores_and_gradients(logits, ids, segments, proj, filter):
    positions = jnp.zeros_like(ids)

    def score(logits):
        scores = logprobs.token_scores(
            _LOGITS, logits, ids, positions, segments,
            filter=filter, unfiltered=True, chunk_size=CHUNK_SIZE,
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
    logits = np.full((_ROWS, _WIDTH, _VOCABULARY), -np.inf, inputs["logits"].dtype)
    logits[:rows, :width, :vocabulary] = inputs["logits"]
    ids, segments = np.zeros((2, _ROWS, _WIDTH), np.int32)
    ids[:rows, :width], segments[:rows, :width] = inputs["input_ids"], 1
    proj = np.zeros((_ROWS, _WIDTH), logits.dtype)
    proj[:rows, 1:width] = inputs["proj"]
    filter = FilterConfig(config["temperature"], config["top_k"], config["top_p"])
    with jax.disable_jit():
        out = _scores_and_gradients(*map(jnp.asarray, (logits, ids, segments, proj)), filter)
    filtered, d_filtered, unfiltered, d_unfiltered = (np.asarray(x)[:rows, :width] for x in out)
    return {
        "logprobs": filtered[:, 1:],
        "grad": d_filtered[..., :vocabulary],
        "logprobs_unfiltered": unfiltered[:, 1:],
        "grad_unfiltered": d_unfiltered[..., :vocabulary],
    }


def check_sampling_config(config):
    """Raise where a run would refuse to sample like this."""
    filter = FilterConfig(config["temperature"], config["top_k"], config["top_p"])
    filtering.check_vocabulary(filter, config["vocab"])
