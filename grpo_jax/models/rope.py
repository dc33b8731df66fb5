"""Rotary position embedding (RoPE, arXiv:2104.09864) and its stretching for longer contexts.

Symbols: `B` rows, `T` tokens a row, `hd` width of a head.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.model_config import Kind, ModelConfig, RopeScaling, has_rope, is_local

Rope = tuple[jax.Array, jax.Array]  # cos, sin: f32[B, T, hd / 2]


def table(
    positions: jax.Array, config: ModelConfig, kind: Kind, lengths: jax.Array | None = None
) -> Rope:
    """Return cos and sin of position * frequency for layers of one kind, f32[B, T, hd / 2].

    frequency_i = theta^(-2 i / hd), stretched as `config.rope_scaling` says. A layer without RoPE
    gets frequency 0: cos = 1 and sin = 0 rotate nothing, exactly.

    Args:
      positions: i32[B, T], or [N] for one token a row.
      config: the model.
      kind: the kind of layer.
      lengths: i32[B, T], tokens of the sequence that each token stands in; only dynamic scaling
        reads it. None: no sequence is longer than `config.max_length`.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    theta, scaling = _theta_and_scaling(config, kind)
    amplitude = 1.0
    if not has_rope(kind):
        frequencies = np.zeros_like(exponents)
    elif scaling is None or scaling.kind == "dynamic":
        frequencies = theta**-exponents
    else:
        frequencies = stretch(theta**-exponents, config.head_dim, theta, scaling)
        amplitude = attention_factor(scaling)
    wide = positions.astype(jnp.float32)
    if has_rope(kind) and lengths is not None and scaling is not None and scaling.kind == "dynamic":
        angles = wide[..., None] * _dynamic(config, scaling.factor, exponents, lengths)
    else:
        angles = jnp.einsum("...,f->...f", wide, jnp.asarray(frequencies, jnp.float32))
    if amplitude == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)


def _theta_and_scaling(config: ModelConfig, kind: Kind) -> tuple[float, RopeScaling | None]:
    """Local layers may have a theta of their own: their window needs no stretching."""
    if is_local(kind) and config.local_rope_theta is not None:
        return config.local_rope_theta, None
    return config.rope_theta, config.rope_scaling


def stretch(frequencies: np.ndarray, width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Lower the frequencies for contexts beyond the length of pre-training.

    With r = original_length * frequency / 2 pi (rotations over the old context) and s in [0, 1]:

        linear:  frequency / factor
        llama3:  frequency * (s + (1 - s) / factor),  s = clip((r - low) / (high - low), 0, 1)
        yarn:    the same with s = 1 - clip((i - i_fast) / (i_slow - i_fast), 0, 1), where i_r is
                 the (fractional) index of the frequency that makes r rotations
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        rotations = scaling.original_length * frequencies / (2 * np.pi)
        kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    else:
        kept = _yarn_kept(len(frequencies), width, theta, scaling)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _yarn_kept(count: int, width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    def index_of(rotations: float) -> float:
        wavelength = scaling.original_length / (rotations * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    fast, slow = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, width - 1)
    slow += 0.001 * (fast == slow)  # as transformers: a step, and no division by 0
    return 1.0 - np.clip((np.arange(count) - fast) / (slow - fast), 0.0, 1.0)


def attention_factor(scaling: RopeScaling) -> float:
    """Return what cos and sin are multiplied with: yarn sharpens attention over long contexts."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def _dynamic(
    config: ModelConfig, factor: float, exponents: np.ndarray, lengths: jax.Array
) -> jax.Array:
    """Let theta grow with the length n of a token's own sequence, f32[B, T, hd / 2].

    theta(n) = theta * (factor * max(n, max_length) / max_length - (factor - 1))^(hd / (hd - 2))
    """
    ratio = jnp.maximum(lengths.astype(jnp.float32) / config.max_length, 1.0)
    power = config.head_dim / (config.head_dim - 2)
    log_theta = math.log(config.rope_theta) + power * jnp.log(factor * ratio - (factor - 1.0))
    return jnp.exp(-jnp.einsum("...,f->...f", log_theta, jnp.asarray(exponents, jnp.float32)))


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate x [B, T, heads, hd]: its first half against its second half, in float32 or wider."""
    cos, sin = (jnp.expand_dims(table, -2) for table in rope)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    first, second = jnp.split(wide, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
