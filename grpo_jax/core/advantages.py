"""From rewards to advantages: one signature, chosen by name.

    compute(config, inputs) -> AdvantageOutput

GRPO, Dr. GRPO, RLOO and GDPO give one number a sequence, f64[N], which the caller spreads over its
tokens; REINFORCE++, GAE, OPD and raw rewards give one a token, f64[N, T]. All run on the host in
double precision (see `estimators_group` for why numpy).

Rows of one group must be in one call, which the loop sees to: a process samples whole groups. Where
a group is spread all the same, gather `rewards` and `groups` first (they are `N` numbers), compute,
and take your own rows: the result does not depend on the order of the rows. Statistics over the
whole batch (whitening, the global baseline of OPD) and all metrics are added over processes by
`all_sum`.

Symbols: `N` rows (completions), `T` tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import numpy as np

from grpo_jax.core import estimators_group, estimators_token, kl
from grpo_jax.core.estimators_group import AllReduce, GroupStatistics

Estimator = Literal["grpo", "dr_grpo", "rloo", "gdpo", "reinforce_plus_plus", "gae", "opd", "raw"]
GROUPED = ("grpo", "dr_grpo", "rloo", "gdpo")  # always compare completions of one prompt
READ_BY: dict[str, tuple[Estimator, ...]] = {
    "normalize_rewards": ("grpo", "gdpo"),
    "use_leave_one_out_baseline": ("grpo", "gdpo"),
    "normalize_by": ("grpo",),
    "epsilon": ("grpo", "gdpo"),
    "constant_tolerance": (*GROUPED, "reinforce_plus_plus"),
    "reference_leave_one_out_std": ("grpo", "gdpo"),
    "filtered_rows_vote": (*GROUPED, "reinforce_plus_plus"),
    "reward_weights": ("gdpo",),
    "minus_baseline": ("reinforce_plus_plus",),
    "kl_in_reward": ("reinforce_plus_plus", "gae"),
    "kl_in_reward_type": ("reinforce_plus_plus", "gae"),
    "normalize_advantages": ("gae", "raw"),
    "gae_gamma": ("gae",),
    "gae_lambda": ("gae",),
    "gae_lambda_value": ("gae",),
    "gae_lambda_policy": ("gae",),
    "length_adaptive_alpha": ("gae",),
    "proximal_teacher_alpha": ("opd",),
    "subtract_global_baseline": ("opd",),
}
"""Which estimators read a key; those that are not here are read by all."""


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How advantages are made. Names and defaults follow the torch reference where it has them."""

    # grpo, dr_grpo, rloo, gdpo, reinforce_plus_plus, gae (with a critic), opd (with a teacher), raw
    estimator: Estimator = "grpo"
    # grpo, gdpo
    normalize_rewards: bool = True  # divide by the standard deviation
    use_leave_one_out_baseline: bool = True  # compare a row with the others of its group only
    normalize_by: Literal["group", "batch"] = "group"  # whose standard deviation (grpo)
    epsilon: float = 1e-6  # added to the standard deviation
    constant_tolerance: float = 1e-6  # rewards closer than this · max(1, |reward|) are equal
    reference_leave_one_out_std: bool = False  # decide row by row whether to normalise (parity)
    filtered_rows_vote: bool = True  # rows that a filter removed still count in baselines
    reward_weights: tuple[float, ...] | None = None  # gdpo: one a component, alphabetical
    # reinforce_plus_plus
    minus_baseline: bool = True  # subtract the group's mean
    # reinforce_plus_plus, gae
    kl_in_reward: float = 0.0  # coefficient of the KL penalty inside the reward, 0 = off
    kl_in_reward_type: Literal["k1", "k2", "k3"] = "k3"  # estimator of that KL
    # gae, raw
    normalize_advantages: bool = True
    # gae
    gae_gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_lambda_value: float | None = None  # for the returns, instead of gae_lambda
    gae_lambda_policy: float | None = None  # for the advantages, instead of gae_lambda
    length_adaptive_alpha: float = 0.0  # lambda_policy = 1 − 1 / (alpha · length), 0 = off
    # opd
    proximal_teacher_alpha: float = 1.0  # share of the teacher in the target mixture
    subtract_global_baseline: bool = False  # subtract the mean over all trained tokens
    # all
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None

    def __post_init__(self):
        """Refuse what cannot be meant."""
        if self.estimator not in get_args(Estimator):
            names = ", ".join(get_args(Estimator))
            raise ValueError(f"estimator={self.estimator!r} is unknown; use one of {names}")
        if self.normalize_by not in ("group", "batch"):
            raise ValueError(
                f"normalize_by={self.normalize_by!r} is unknown; use 'group' or 'batch'"
            )
        kl.check_kl_type(self.kl_in_reward_type, "kl_in_reward_type")
        for name in ("epsilon", "constant_tolerance", "kl_in_reward", "length_adaptive_alpha"):
            _check_range(name, getattr(self, name), 0.0, math.inf)
        for name in ("gae_gamma", "gae_lambda", "gae_lambda_value", "gae_lambda_policy"):
            _check_range(name, getattr(self, name), 0.0, 1.0)
        _check_range("proximal_teacher_alpha", self.proximal_teacher_alpha, 0.0, 1.0)
        if self.proximal_teacher_alpha == 0:
            raise ValueError(
                "proximal_teacher_alpha=0.0 leaves no teacher; use a number above 0, 1 for the "
                "plain teacher"
            )
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"advantage_clip_low={low} is above advantage_clip_high={high}; swap them"
            )

    def unread(self) -> dict[str, str]:
        """Keys that were set to another value than the default and that nothing reads, with why."""
        found = {}
        for field in dataclasses.fields(self):
            readers = READ_BY.get(field.name, (self.estimator,))
            if getattr(self, field.name) == field.default:
                continue
            if self.estimator not in readers:
                found[field.name] = f"the estimator {self.estimator!r} does not read it"
            elif field.name == "kl_in_reward_type" and self.kl_in_reward == 0:
                found[field.name] = "kl_in_reward is 0"
            elif field.name == "gae_lambda_policy" and self.length_adaptive_alpha > 0:
                found[field.name] = "length_adaptive_alpha is above 0 and decides"
            elif field.name in ("epsilon", "normalize_by", "reference_leave_one_out_std"):
                if not self.normalize_rewards:
                    found[field.name] = "normalize_rewards is false"
        return found

    @property
    def needs_rewards(self) -> bool:
        """Whether advantages are made of rewards."""
        return self.estimator != "opd"

    @property
    def compares_group(self) -> bool:
        """Whether an advantage needs at least two completions of one prompt."""
        return self.estimator in GROUPED or (
            self.estimator == "reinforce_plus_plus" and self.minus_baseline
        )

    @property
    def needs_values(self) -> bool:
        """Whether a critic's values are needed."""
        return self.estimator == "gae"

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher's log-probabilities are needed."""
        return self.estimator == "opd"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the frozen reference are needed."""
        return self.kl_in_reward > 0 and self.estimator in ("reinforce_plus_plus", "gae")

    @property
    def needs_policy_logprobs(self) -> bool:
        """Whether log-probabilities of the policy are needed before the loss."""
        return self.needs_reference or self.needs_teacher


@dataclasses.dataclass(frozen=True)
class AdvantageInputs:
    """What estimators may look at; each uses its own part and says so when one is missing."""

    rewards: np.ndarray  # f[N], after scaling and shaping
    groups: np.ndarray  # i[N], equal ids = completions of one prompt
    mask: np.ndarray | None = None  # f[N, T] token mask · sample weight
    valid: np.ndarray | None = None  # bool[N], False = no vote in any baseline
    components: Mapping[str, np.ndarray] | None = None  # name -> f[N], for gdpo
    policy_logprobs: np.ndarray | None = None  # f[N, T] nats, start of the step; may be -inf
    reference_logprobs: np.ndarray | None = None  # f[N, T] nats
    teacher_logprobs: np.ndarray | None = None  # f[N, T'] nats, T' <= T
    values: np.ndarray | None = None  # f[N, T] critic, of the state before each token


class AdvantageOutput(NamedTuple):
    """Advantages, and what is worth a curve."""

    advantages: np.ndarray  # f64[N] or f64[N, T]
    metrics: dict[str, float]
    returns: np.ndarray | None = None  # f64[N, T], gae only: targets of the critic
    statistics: GroupStatistics | None = None  # of the estimators that compare a group


def validate_group_size(config: AdvantageConfig, group_size: int) -> None:
    """Refuse a group too small to be compared: every advantage would be zero, silently.

    Raises:
      ValueError: one completion a prompt with an estimator that subtracts a group baseline.
    """
    if group_size < 1:
        raise ValueError(f"{group_size} completions a prompt is not possible; use at least 1")
    if config.compares_group and group_size < 2:
        raise ValueError(
            f"estimator {config.estimator!r} compares completions of one prompt, and "
            f"{group_size} leaves nothing to compare (every advantage would be 0); use 2 or more, "
            "or estimator 'reinforce_plus_plus' with minus_baseline=false"
        )


def compute(
    config: AdvantageConfig, inputs: AdvantageInputs, *, all_sum: AllReduce = np.asarray
) -> AdvantageOutput:
    """Make the advantages of one step's rows, before overrides and clipping.

    Args:
      all_sum: adds an array over all processes; the identity in a single one.
    Raises:
      ValueError: an input that the estimator needs is missing, or a reward is not finite.
    """
    return _ESTIMATORS[config.estimator](config, inputs, all_sum)


def clip(advantages: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    """Clamp to [low, high]; None is open. Comes last, after `override_spans`."""
    if low is None and high is None:
        return advantages
    return np.clip(advantages, low, high)


class Span(NamedTuple):
    """A flagged stretch of one row's tokens."""

    row: int
    start: int  # first token
    end: int  # one past the last
    value: float  # the advantage all its tokens get


def override_spans(advantages: np.ndarray, spans: list[Span], width: int) -> np.ndarray:
    """Overwrite the advantage of flagged messages, f64[N, T]; later spans win.

    List the flags of least priority first (an invalid tool call stands above malformed thinking).
    Per-sequence advantages f[N] are spread over `width` tokens first.
    """
    if advantages.ndim == 1:
        advantages = np.broadcast_to(advantages[:, None], (len(advantages), width))
    out = np.array(advantages)
    for span in spans:
        if not 0 <= span.start <= span.end <= out.shape[1] or not 0 <= span.row < len(out):
            raise ValueError(f"{span} is outside the advantages of shape {out.shape}")
        out[span.row, span.start : span.end] = span.value
    return out


def summarise(
    advantages: np.ndarray,
    mask: np.ndarray,
    *,
    all_sum: AllReduce = np.asarray,
    all_max: AllReduce = np.asarray,
) -> dict[str, float]:
    """Mean, extremes and spread over trained tokens (token mask · sample weight), 0 without any.

    `all_sum` and `all_max` reach over all processes.
    """
    if advantages.ndim == 1:
        advantages = np.broadcast_to(advantages[:, None], mask.shape)
    x = advantages[mask != 0]
    mean, std = estimators_token.moments(advantages, mask, all_sum)
    low, high = all_max(np.array([-x.min(initial=np.inf), x.max(initial=-np.inf)])) * (-1, 1)
    return {
        "advantages/mean": mean,
        "advantages/std": std,
        "advantages/min": float(low) if low <= high else 0.0,
        "advantages/max": float(high) if low <= high else 0.0,
    }


def _grpo(config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce) -> AdvantageOutput:
    """A = r − b, divided by s + ε where s > 0."""
    rewards, stats = _compare(config, inputs, inputs.rewards)
    advantages = rewards - stats.baseline
    if config.normalize_rewards and config.normalize_by == "batch":
        _, std = estimators_group.batch_std(rewards, inputs.valid, all_sum)
        advantages = estimators_group.normalise(advantages, np.asarray(std), config.epsilon)
    elif config.normalize_rewards:
        advantages = estimators_group.normalise(advantages, stats.std, config.epsilon)
    return AdvantageOutput(advantages, _group_metrics(stats, all_sum), statistics=stats)


def _dr_grpo(
    config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce
) -> AdvantageOutput:
    """A = r − mean of the group: GRPO without its two biases (the other one is the loss's)."""
    plain = dataclasses.replace(config, normalize_rewards=False, use_leave_one_out_baseline=False)
    return _grpo(plain, inputs, all_sum)


def _rloo(config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce) -> AdvantageOutput:
    """A = r − mean of the others of the group."""
    plain = dataclasses.replace(config, normalize_rewards=False, use_leave_one_out_baseline=True)
    return _grpo(plain, inputs, all_sum)


def _gdpo(config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce) -> AdvantageOutput:
    """A = whiten(Σ_c w_c · GRPO(component c)), so that no component drowns another."""
    total = np.zeros(len(inputs.groups))
    metrics: dict[str, float] = {}
    weighed = estimators_group.weigh_components(inputs.components, config.reward_weights)
    for name, values, weight in weighed:
        # A component without a verdict on a row has no say there: neither a vote nor an advantage.
        spoken = ~np.isnan(np.asarray(values, np.float64))
        votes = spoken if inputs.valid is None else spoken & (np.asarray(inputs.valid) != 0)
        values, stats = _compare(config, dataclasses.replace(inputs, valid=votes), values)
        part = np.where(spoken, values - stats.baseline, 0.0)
        if config.normalize_rewards:
            part = estimators_group.normalise(part, stats.std, config.epsilon)
        total += weight * part
        metrics[f"advantages/constant_groups/{name}"] = _constant_share(stats, all_sum)
    return AdvantageOutput(estimators_group.whiten_rows(total, inputs.valid, all_sum), metrics)


def _reinforce_plus_plus(
    config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce
) -> AdvantageOutput:
    """A_t = whiten over all tokens (r [− group mean] − β · KL_t)."""
    mask = _need("mask", inputs.mask, config)
    plain = dataclasses.replace(config, use_leave_one_out_baseline=False)
    rewards, stats = _compare(plain, inputs, inputs.rewards)
    centred = rewards - stats.baseline if config.minus_baseline else rewards
    tokens = np.broadcast_to(centred[:, None], mask.shape) - _kl_penalty(config, inputs)
    whitened = estimators_token.whiten(tokens, mask, all_sum)
    return AdvantageOutput(whitened, _group_metrics(stats, all_sum), statistics=stats)


def _gae(config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce) -> AdvantageOutput:
    """Generalised advantage estimates, with separate λ for the critic and the policy if asked."""
    mask = _need("mask", inputs.mask, config)
    values = np.asarray(_need("values", inputs.values, config), np.float64)
    rewards = estimators_token.place_at_end(_rewards(inputs), mask) - _kl_penalty(config, inputs)

    def traces(decay: float | np.ndarray) -> np.ndarray:
        return estimators_token.discounted_traces(rewards, values, mask, config.gae_gamma, decay)

    for_value = config.gae_lambda if config.gae_lambda_value is None else config.gae_lambda_value
    for_policy = config.gae_lambda if config.gae_lambda_policy is None else config.gae_lambda_policy
    if config.length_adaptive_alpha > 0:
        for_policy = estimators_token.length_adaptive_decay(mask, config.length_adaptive_alpha)
    advantages, returns = traces(for_policy), traces(for_value) + values
    if config.normalize_advantages:
        advantages = estimators_token.whiten_unbiased(advantages, mask, all_sum)
    metrics = estimators_token.value_fit(values, returns, mask, all_sum)
    return AdvantageOutput(np.where(mask != 0, advantages, 0), metrics, returns=returns)


def _opd(config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce) -> AdvantageOutput:
    """A_t = log p_teacher − log p_policy; rewards are not used."""
    mask = _need("mask", inputs.mask, config)
    student = _need("policy_logprobs", inputs.policy_logprobs, config)
    teacher = _need("teacher_logprobs", inputs.teacher_logprobs, config)
    alpha = config.proximal_teacher_alpha
    gap, raw, valid = estimators_token.distillation_gap(student, teacher, mask, alpha)
    weights = np.where(valid, mask, 0)
    if config.subtract_global_baseline:
        gap = np.where(valid, gap - estimators_token.mean(gap, weights, all_sum), 0)
    mean, std = estimators_token.moments(gap, weights, all_sum)
    metrics = {
        "teacher_student_logprob_gap_mean": estimators_token.mean(raw, weights, all_sum),
        "adv_mean": mean,
        "adv_std": std,
    }
    return AdvantageOutput(
        gap, {f"on_policy_distillation/{name}": value for name, value in metrics.items()}
    )


def _raw(config: AdvantageConfig, inputs: AdvantageInputs, all_sum: AllReduce) -> AdvantageOutput:
    """A_t = r, whitened over all tokens if asked."""
    mask = _need("mask", inputs.mask, config)
    rewards = _rewards(inputs)
    tokens = np.broadcast_to(rewards[:, None], mask.shape)
    if config.normalize_advantages:
        tokens = estimators_token.whiten(tokens, mask, all_sum)
    return AdvantageOutput(tokens, {})


_ESTIMATORS: dict[str, Callable[[AdvantageConfig, AdvantageInputs, AllReduce], AdvantageOutput]] = (
    dict(
        grpo=_grpo,
        dr_grpo=_dr_grpo,
        rloo=_rloo,
        gdpo=_gdpo,
        reinforce_plus_plus=_reinforce_plus_plus,
        gae=_gae,
        opd=_opd,
        raw=_raw,
    )
)


def _compare(
    config: AdvantageConfig, inputs: AdvantageInputs, rewards: np.ndarray
) -> tuple[np.ndarray, GroupStatistics]:
    """The rewards in double precision, with their group's statistics."""
    stats = estimators_group.group_statistics(
        rewards,
        np.asarray(inputs.groups),
        leave_one_out=config.use_leave_one_out_baseline,
        valid=inputs.valid,
        tolerance=config.constant_tolerance,
        reference_std=config.reference_leave_one_out_std,
    )
    rows = len(stats.baseline)
    return estimators_group.finite_rewards("rewards", rewards, rows, inputs.valid), stats


def _rewards(inputs: AdvantageInputs) -> np.ndarray:
    rows = len(inputs.groups)
    return estimators_group.finite_rewards("rewards", inputs.rewards, rows, inputs.valid)


def _kl_penalty(config: AdvantageConfig, inputs: AdvantageInputs) -> np.ndarray | float:
    """β · KL at each token, f64[N, T]; 0 where it is switched off."""
    if not config.needs_reference:
        return 0.0
    policy = _need("policy_logprobs", inputs.policy_logprobs, config)
    reference = _need("reference_logprobs", inputs.reference_logprobs, config)
    return config.kl_in_reward * estimators_token.reward_kl(
        policy, reference, config.kl_in_reward_type
    )


def _need(name: str, value: np.ndarray | None, config: AdvantageConfig) -> np.ndarray:
    if value is None:
        raise ValueError(
            f"estimator {config.estimator!r} needs {name}, which was not given; score it before "
            "the advantages, or choose another estimator"
        )
    return np.asarray(value)


def _constant_share(stats: GroupStatistics, all_sum: AllReduce) -> float:
    """Share of rows whose group has no spread, and so nothing to learn from."""
    constant, rows = all_sum(np.array([stats.constant.sum(), stats.constant.size]))
    return float(constant) / max(int(rows), 1)


def _group_metrics(stats: GroupStatistics, all_sum: AllReduce) -> dict[str, float]:
    """Shares of rows by what their baseline says: all wrong, all right, or mixed."""
    b = stats.baseline
    zero, one, rows = all_sum(np.array([(b == 0).sum(), (b == 1).sum(), b.size])).tolist()
    return {
        "baseline_reward/pct_0": 100 * zero / max(rows, 1),
        "baseline_reward/pct_1": 100 * one / max(rows, 1),
        "baseline_reward/pct_mixed": 100 * (rows - zero - one) / max(rows, 1),
        "advantages/constant_groups": _constant_share(stats, all_sum),
    }


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raise unless low <= value <= high; None is fine."""
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name}={value} must lie in [{low:g}, {high:g}]")
