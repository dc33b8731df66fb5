"""Estimators that give every token its own advantage: REINFORCE++, GAE, OPD, raw reward.

Plain numpy in double precision on the host, as in `estimators_group`. All `[N, T]` arrays are
token-aligned. `mask` is the token mask times the sample weight; a token counts where it is not 0.
Statistics select by the mask before any arithmetic, so nothing outside it can leak in.

Tokens outside the support of the policy (log-probability −inf under top-k/top-p) carry no KL
penalty and no distillation advantage.

Symbols: `N` rows, `T` tokens, `V_t` value of the state before token t, γ discount, λ trace decay.

Papers: REINFORCE++, https://arxiv.org/abs/2501.03262; GAE, https://arxiv.org/abs/1506.02438;
VAPO (decoupled and length-adaptive λ), https://arxiv.org/abs/2504.05118;
on-policy distillation, https://arxiv.org/abs/2306.13649.
"""

import functools

import jax
import numpy as np

from grpo_jax.core import kl
from grpo_jax.core.estimators_group import AllReduce

VARIANCE_FLOOR = 1e-8
MEAN_EPSILON = 1e-8  # the torch reference's masked mean: Σ mask·x / (Σ mask + 1e-8)


def reward_kl(policy: np.ndarray, reference: np.ndarray, kl_type: str) -> np.ndarray:
    """KL estimate at each token, f64[N, T] nats, clamped to ±10; 0 where the policy is not finite.

    Without the rule a token outside the top-p set, log-probability −inf, would be fined with the
    clamp's full 10 nats for having been impossible.
    """
    policy, reference = np.asarray(policy), np.asarray(reference)
    supported = np.isfinite(policy)
    policy = np.where(supported, policy, 0)
    reference = np.where(supported, reference, 0)
    # One flat power of two: batches of every shape then share a handful of compiled programs.
    size = max(1024, 1 << int(policy.size - 1).bit_length())
    flat = [np.pad(x.reshape(-1), (0, size - x.size)) for x in (policy, reference)]
    estimate = _jitted_kl(*flat, kl_type=kl_type)
    return np.asarray(estimate, np.float64)[: policy.size].reshape(policy.shape)


@functools.partial(jax.jit, static_argnames="kl_type")
def _jitted_kl(policy: jax.Array, reference: jax.Array, *, kl_type: str) -> jax.Array:
    return kl.calculate_kl(policy, reference, kl_type)


def whiten(values: np.ndarray, mask: np.ndarray, all_sum: AllReduce) -> np.ndarray:
    """Shift and scale to mean 0, variance 1 over the mask: (x − μ) / √max(σ², 1e-8).

        μ = Σ m·x / Σ m,   σ² = Σ m·(x − μ)² / Σ m       population moments

    Values outside the mask are moved along. An empty mask leaves nothing to measure: μ = σ² = 0.
    """
    mean, variance, _ = _moments(values, mask, all_sum, 0.0)
    return (values - mean) / np.sqrt(max(variance, VARIANCE_FLOOR))


def whiten_unbiased(values: np.ndarray, mask: np.ndarray, all_sum: AllReduce) -> np.ndarray:
    """(x − μ) / √(σ² + 1e-8) with the sample variance, zero outside the mask; zeros if Σ m ≤ 1."""
    mean, variance, count = _moments(values, mask, all_sum, MEAN_EPSILON)
    if count <= 1:
        return np.zeros_like(values)
    scale = np.sqrt(variance * count / (count - 1) + VARIANCE_FLOOR)
    return np.where(mask != 0, (values - mean) / scale, 0)


def _moments(
    values: np.ndarray, mask: np.ndarray, all_sum: AllReduce, epsilon: float
) -> tuple[float, float, float]:
    """Mean, variance and count over the mask of all processes, in two passes."""
    keep = mask != 0
    x, m = values[keep], np.asarray(mask, np.float64)[keep]
    total, count = all_sum(np.array([(m * x).sum(), m.sum()]))
    divisor = count + epsilon if count > 0 else 1.0
    mean = total / divisor
    squares = all_sum(np.array([(m * np.square(x - mean)).sum()]))[0]
    return float(mean), float(squares / divisor), float(count)


def place_at_end(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """f64[N, T]: the row's reward at its last trained token; a row without any gets none."""
    columns = np.arange(mask.shape[1])[None, :]
    last = np.where(mask != 0, columns, -1).max(axis=1, keepdims=True, initial=-1)
    return np.where(columns == last, np.asarray(rewards, np.float64)[:, None], 0.0)


def discounted_traces(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    gamma: float,
    decay: float | np.ndarray,
) -> np.ndarray:
    """Generalised advantage estimates f64[N, T], carried unchanged across masked tokens.

        δ_t = R_t + γ V_{t+1} − V_t;   Â_t = δ_t + γ λ Â_{t+1}

    t + 1 is the next *trained* token: a tool's answer between two turns neither resets the trace
    nor costs a discount. At a masked token the value of the next trained one is returned.
    """
    rows, width = mask.shape
    trained = np.ascontiguousarray((mask != 0).T)  # [T, N]: one step of the loop is contiguous
    v = np.where(trained, values.T, 0)
    r = np.where(trained, rewards.T, 0)
    traces = np.empty((width, rows))
    next_value, trace = np.zeros(rows), np.zeros(rows)
    for t in range(width - 1, -1, -1):
        delta = r[t] + gamma * next_value - v[t]
        trace = np.where(trained[t], delta + gamma * decay * trace, trace)
        next_value = np.where(trained[t], v[t], next_value)
        traces[t] = trace
    return np.ascontiguousarray(traces.T)


def value_fit(
    values: np.ndarray, returns: np.ndarray, mask: np.ndarray, all_sum: AllReduce
) -> dict[str, float]:
    """How well values foretold the returns, over the mask; zeros where it is empty.

    explained_var = 1 − Var(R − V) / max(Var(R), 1e-8): 1 is perfect, 0 no better than a constant.
    """
    returns, values = (np.where(mask != 0, x, 0) for x in (returns, values))
    returns_mean, returns_var, _ = _moments(returns, mask, all_sum, 0.0)
    _, residual_var, count = _moments(returns - values, mask, all_sum, 0.0)
    explained = 1 - residual_var / max(returns_var, VARIANCE_FLOOR) if count > 0 else 0.0
    return {
        "critic/explained_var": explained,
        "critic/returns_mean": returns_mean,
        "critic/values_mean": _moments(values, mask, all_sum, 0.0)[0],
    }


def length_adaptive_decay(mask: np.ndarray, alpha: float) -> np.ndarray:
    """f64[N]: λ = clip(1 − 1 / max(α · n, 1), 0, 1) for a row of n trained tokens."""
    counts = (mask != 0).sum(axis=1)
    return np.clip(1 - 1 / np.maximum(alpha * counts, 1), 0, 1)


def distillation_gap(
    student: np.ndarray, teacher: np.ndarray, mask: np.ndarray, alpha: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Teacher minus student, per token, and the mask of tokens that count.

        A = log(α e^{l_teacher} + (1 − α) e^{l_student}) − l_student      (α = 1: the plain gap)

    A mixture with α < 1 bounds the penalty: A ≥ log(1 − α).

    Returns:
      A f64[N, T] (0 outside), the raw gap f64[N, T] (0 outside), and bool[N, T]: mask, and the
      student finite.

    Raises:
      ValueError: the teacher gives a counting token probability zero, and α = 1.
    """
    student = np.asarray(student, np.float64)
    teacher = _pad_teacher(np.asarray(teacher, np.float64), student.shape[1])
    valid = (mask != 0) & np.isfinite(student)
    ls, lt = np.where(valid, student, 0), np.where(valid, teacher, 0)
    if alpha == 1 and not np.isfinite(lt).all():
        raise ValueError(
            "the teacher's log-probability of a sampled token is not finite; score the teacher "
            "without top-k/top-p, or set proximal_teacher_alpha below 1"
        )
    raw = lt - ls
    if alpha == 1:
        return raw, raw, valid
    mixed = np.logaddexp(np.log(alpha) + lt, np.log1p(-alpha) + ls) - ls
    return np.where(valid, mixed, 0), raw, valid


def _pad_teacher(teacher: np.ndarray, width: int) -> np.ndarray:
    """Zero-pad on the right to the student's width."""
    if teacher.shape[1] > width:
        raise ValueError(
            f"teacher_logprobs has {teacher.shape[1]} columns, the student has {width}; "
            "score the teacher on the same tokens"
        )
    return np.pad(teacher, ((0, 0), (0, width - teacher.shape[1])))


def mean(values: np.ndarray, mask: np.ndarray, all_sum: AllReduce) -> float:
    """Mean over a mask; 0 where it is empty, infinite where a value is."""
    keep = mask != 0
    m = np.asarray(mask, np.float64)[keep]
    total, count = all_sum(np.array([(m * values[keep]).sum(), m.sum()]))
    return float(total / count) if count > 0 else 0.0


def moments(values: np.ndarray, mask: np.ndarray, all_sum: AllReduce) -> tuple[float, float]:
    """Mean and sample standard deviation over a mask; 0 and 0 where too little is left."""
    mean, variance, count = _moments(values, mask, all_sum, 0.0)
    return mean, float(np.sqrt(variance * count / (count - 1))) if count > 1 else 0.0
