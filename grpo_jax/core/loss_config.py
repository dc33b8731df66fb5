"""Every switch of the loss, under the torch reference's own key names, checked when it is built.

A block of a torch recipe can be pasted in and means the same. What the reference rejects, or only
notices late, is a `ValueError` at construction that names the key, the value and the way out.
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, TypeGuard

import jax
import jax.core as jax_core
import numpy as np

KLType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis", "geo-rs", "product-rs"]
Objective = Literal["sapo", "gmpo"]

BAND_TYPES = ("icepop", "seq-mask-tis", "geo-rs", "product-rs")
"""Truncation types that need a lower bound as well as an upper one."""

SEQUENCE_TYPES = ("seq-mask-tis", "geo-rs", "product-rs")
"""Truncation types that keep or drop whole sequences."""

LARGEST_CAP = 40.0
"""Largest `log_ratio_cap`."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Which loss. Names and defaults of the first block are the torch reference's.

    Number fields may hold traced JAX scalars (`dataclasses.replace` under `vmap`), which are not
    checked; arrays of shape () that can be read become ordinary numbers. Other fields are static.

    Raises:
      ValueError: names the key, its value and the way out.
    """

    disable_ppo_ratio: bool = False
    """REINFORCE / RLOO: the log-probability stands in place of the ratio."""
    token_level_loss: bool = True
    """True: mean over tokens. False: mean inside each response, then over responses."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one geometric-mean ratio a response; importance weights become products too."""
    ratio_clip_min: float = 0.2
    """The ratio is clipped to [1 - ratio_clip_min, 1 + ratio_clip_max]."""
    ratio_clip_max: float = 0.2
    """Upper side of the clip; above ratio_clip_min it is DAPO's clip-higher."""
    ratio_clip_c: float | None = None
    """Dual clip: a negative advantage never costs more than this times its size; above 1."""
    reference_policy_kl_penalty: float = 0.01
    """beta, the weight of the KL term."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of the KL term, and of the two sampler-mismatch metrics."""
    kl_input_clamp_value: float | None = 20.0
    """Bound on the log-ratio that enters the KL, nats; None is off."""
    kl_output_clamp_value: float | None = 10.0
    """Bound on the KL of one token, nats; None is off."""
    use_kl_in_reward: bool = False
    """The KL is part of the reward, so the loss leaves it out."""
    use_importance_sampling_correction: bool = False
    """Multiply each token's objective by p_train / p_sampler."""
    truncated_importance_sampling_type: TruncationType | None = None
    """What happens to weights outside the bounds; see `corrections`."""
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of the weights."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound of the weights."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL by p_current / p_sampler."""
    force_on_policy_ratio: bool = False
    """The ratio is 1 in value and its gradient is that of log p."""
    use_cispo: bool = False
    """The clipped ratio is a constant weight on log p, so clipped tokens keep their gradient."""
    positive_example_nll_weight: float = 0.0
    """Weight of the negative log-likelihood of sequences with reward > 0."""
    seq_logprob_error_in_loss: bool = False
    """Reject sequences on which trainer and sampler disagree, inside the loss."""

    seq_logprob_error_threshold: float | None = None
    """Largest mean of exp|log p_gen - log p| that a sequence may have to be kept."""
    metrics_level: Literal["full", "minimal"] = "full"
    """minimal leaves out ratio statistics, mismatch KL, JSD, approx_entropy; same gradients."""
    truncated_is_normalization: Literal["batch", "survivors"] = "batch"
    """Divide the actor term by the batch's counts (reference) or by what the truncation left."""
    objective: Objective | None = None
    """Surrogates that the reference does not have; None: the switches above decide."""
    loss_normalizer: float | None = None
    """Dr. GRPO: sum each response's tokens and divide by this constant, not by its length."""
    sapo_temperature_positive: float = 1.0
    """SAPO's gate temperature for positive advantages."""
    sapo_temperature_negative: float = 1.05
    """SAPO's gate temperature for negative advantages."""
    token_veto_threshold: float | None = None
    """Reject a sequence in which any token's weight p_train / p_sampler is below this."""
    entropy_bonus: float = 0.0
    """Weight of the policy entropy, which is subtracted from the loss."""
    log_ratio_cap: float = 20.0
    """Log-ratios above this enter `exp` as this, with zero gradient: e^20 = 4.9e8."""
    importance_weight_overflow: Literal["drop", "truncate"] = "drop"
    """A weight too large for the number type: becomes 0 (reference), or stays large for `tis`."""
    positive_nll_local_count: bool = False
    """Parity: divide the positive NLL by this call's own count, so cuts of the batch matter."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (np.ndarray, jax.Array)) and not isinstance(
                value, jax_core.Tracer
            ):
                if value.ndim:
                    _refuse(field.name, value, f"has shape {value.shape}; give one number")
                object.__setattr__(self, field.name, value.item())
        for check in _CHECKS:
            check(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LossConfig":
        """Build from a mapping and refuse keys that do not exist.

        Raises:
          ValueError: an unknown key (with the closest known one), or anything illegal.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {known}"
                raise ValueError(f"unknown loss key {key!r}{hint}")
        return cls(**values)

    @property
    def surrogate(self) -> str:
        """Name of the row in `surrogates.SURROGATES` that these switches select."""
        if self.objective is not None:
            return self.objective
        if self.force_on_policy_ratio:
            return "on_policy"
        if self.disable_ppo_ratio:
            return "reinforce"
        return "cispo" if self.use_cispo else "ppo"

    @property
    def kl_on(self) -> bool:
        """Whether the loss has a KL term. A traced beta counts as on."""
        return not self.use_kl_in_reward and not _is_zero(self.reference_policy_kl_penalty)

    @property
    def positive_nll_on(self) -> bool:
        """Whether the loss has a positive-example term."""
        return not _is_zero(self.positive_example_nll_weight)

    @property
    def entropy_bonus_on(self) -> bool:
        """Whether the loss has an entropy term."""
        return not _is_zero(self.entropy_bonus)

    @property
    def other_terms_on(self) -> bool:
        """Whether the loss has a gradient besides the actor term's."""
        return self.kl_on or self.positive_nll_on or self.entropy_bonus_on

    @property
    def survivors_first(self) -> bool:
        """Whether survivors must be counted before the loss: not all terms are divided by them.

        Where the actor term is alone, one factor on its gradient does the same at the end.
        """
        return self.truncated_is_normalization == "survivors" and self.other_terms_on

    def gates_read_policy(self, filtering_on: bool) -> bool:
        """Whether what a gate drops depends on the current policy, not on the batch alone."""
        return self.force_on_policy_ratio or filtering_on

    @property
    def sequence_truncation(self) -> bool:
        """Whether the truncation decides about whole sequences."""
        return self.truncated_importance_sampling_type in SEQUENCE_TYPES


def _is_number(value: Any) -> TypeGuard[float]:
    """An ordinary number, as opposed to None, a flag, or a traced scalar."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_zero(value: Any) -> bool:
    return _is_number(value) and value == 0


def _refuse(key: str, value: Any, reason: str) -> NoReturn:
    raise ValueError(f"{key}={value!r} {reason}")


def _check_types(config: LossConfig) -> None:
    """Flags are flags, numbers are finite numbers, names are on their list."""
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if isinstance(default, bool):
            if not isinstance(value, bool):
                _refuse(field.name, value, "is not a boolean; write true or false")
        elif field.name in _CHOICES:
            if value not in _CHOICES[field.name]:
                options = ", ".join(repr(name) for name in _CHOICES[field.name])
                _refuse(field.name, value, f"is unknown; use one of {options}")
        elif isinstance(value, (str, bytes, bool, list, tuple, dict)):
            _refuse(field.name, value, "is not a number")
        elif value is None and default is not None and field.name not in _NULLABLE:
            _refuse(field.name, value, f"is not a number; the default is {default}")
        elif _is_number(value) and not math.isfinite(value):
            _refuse(field.name, value, "is not finite; use a finite number")


_NULLABLE = ("kl_input_clamp_value", "kl_output_clamp_value")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "reference_policy_kl_type": ("k1", "k2", "k3"),
    "truncated_importance_sampling_type": (None, "tis", *BAND_TYPES),
    "metrics_level": ("full", "minimal"),
    "truncated_is_normalization": ("batch", "survivors"),
    "objective": (None, "sapo", "gmpo"),
    "importance_weight_overflow": ("drop", "truncate"),
}


def _check_ranges(config: LossConfig) -> None:
    """Each number lies where its formula needs it."""

    def at_least(key: str, limit: float, strict: bool, way_out: str) -> None:
        value = getattr(config, key)
        if _is_number(value) and (value <= limit if strict else value < limit):
            relation = "above" if strict else "at least"
            _refuse(key, value, f"must be {relation} {limit}; {way_out}")

    at_least("ratio_clip_min", 0.0, False, "0.2 is the usual value")
    at_least("ratio_clip_max", 0.0, False, "0.2 is the usual value")
    at_least("ratio_clip_c", 1.0, True, "use null to switch the dual clip off")
    at_least("reference_policy_kl_penalty", 0.0, False, "use 0 to switch the KL term off")
    at_least("kl_input_clamp_value", 0.0, True, "use null to switch the clamp off")
    at_least("kl_output_clamp_value", 0.0, True, "use null to switch the clamp off")
    at_least("positive_example_nll_weight", 0.0, False, "use 0 to switch the term off")
    at_least("entropy_bonus", 0.0, False, "use 0 to switch the bonus off")
    at_least("loss_normalizer", 0.0, True, "use null to divide by each response's own length")
    at_least("sapo_temperature_positive", 0.0, True, "1.0 is the paper's value")
    at_least("sapo_temperature_negative", 0.0, True, "1.05 is the paper's value")
    at_least("token_veto_threshold", 0.0, True, "use null to switch the veto off")
    at_least("log_ratio_cap", 0.0, True, "20 is the default")
    if _is_number(config.log_ratio_cap) and config.log_ratio_cap > LARGEST_CAP:
        _refuse(
            "log_ratio_cap",
            config.log_ratio_cap,
            f"must be at most {LARGEST_CAP:g}: float32 ends at e^88, and the ratio is multiplied by"
            " advantages and weights; 20 is the default",
        )
    at_least("seq_logprob_error_threshold", 1.0, False, "the error of perfect agreement is 1")


def _check_ratio(config: LossConfig) -> None:
    """Ratio kinds that do not go together."""
    gspo, token = config.sequence_level_importance_ratios, config.token_level_loss
    if gspo and token:
        raise ValueError(
            "sequence_level_importance_ratios=True needs token_level_loss=False: "
            "one ratio a response only makes sense with the mean over responses"
        )
    if config.use_cispo:
        for key, bad in (
            ("disable_ppo_ratio", config.disable_ppo_ratio),
            ("force_on_policy_ratio", config.force_on_policy_ratio),
            ("sequence_level_importance_ratios", gspo),
            ("ratio_clip_c", config.ratio_clip_c is not None),
            ("token_level_loss", not token),
        ):
            if bad:
                _refuse(
                    "use_cispo",
                    True,
                    f"does not combine with {key}={getattr(config, key)!r}: CISPO weights each "
                    f"token by its own clipped ratio; reset {key} to its default",
                )


def _check_truncation(config: LossConfig) -> None:
    """The truncation has its type, its bounds and something to truncate."""
    kind = config.truncated_importance_sampling_type
    high = config.truncated_importance_sampling_ratio
    low = config.truncated_importance_sampling_ratio_min
    name = "truncated_importance_sampling_type"
    if kind is None:
        if high is not None:
            _refuse(
                "truncated_importance_sampling_ratio", high, f"is set but {name} is null; name one"
            )
        return
    if not config.use_importance_sampling_correction:
        _refuse(name, kind, "needs use_importance_sampling_correction=True")
    if high is None or (_is_number(high) and high <= 0):
        _refuse(name, kind, f"needs truncated_importance_sampling_ratio above 0, got {high!r}")
    if low is None and kind in BAND_TYPES:
        _refuse(name, kind, "needs truncated_importance_sampling_ratio_min as well")
    if _is_number(low) and _is_number(high) and low > high:
        _refuse(
            "truncated_importance_sampling_ratio_min",
            low,
            f"is above truncated_importance_sampling_ratio={high!r}; swap them",
        )
    if kind in SEQUENCE_TYPES and config.sequence_level_importance_ratios:
        _refuse(
            name,
            kind,
            "does not combine with sequence_level_importance_ratios=True: "
            "the gate reads token-level weights; use tis or icepop",
        )


def _check_rejection(config: LossConfig) -> None:
    """The sequence check inside the loss has what it needs."""
    if not config.seq_logprob_error_in_loss:
        if config.seq_logprob_error_threshold is not None:
            _refuse(
                "seq_logprob_error_threshold",
                config.seq_logprob_error_threshold,
                "has no effect without seq_logprob_error_in_loss=True; set it, or give the "
                "threshold to the filter that runs before the loss",
            )
        return
    for key, wrong in (
        ("seq_logprob_error_threshold", config.seq_logprob_error_threshold is None),
        ("force_on_policy_ratio", not config.force_on_policy_ratio),
        ("token_level_loss", not config.token_level_loss),
        ("positive_example_nll_weight", config.positive_nll_on),
    ):
        if wrong:
            raise ValueError(
                f"seq_logprob_error_in_loss=True does not work with {key}={getattr(config, key)!r};"
                " it needs a threshold, force_on_policy_ratio=True, token_level_loss=True and"
                " positive_example_nll_weight=0"
            )


def _check_beyond(config: LossConfig) -> None:
    """Options that the reference does not have, where they meet those that it has."""
    if config.objective is not None:
        for key in (
            "disable_ppo_ratio",
            "force_on_policy_ratio",
            "use_cispo",
            "sequence_level_importance_ratios",
        ):
            if getattr(config, key):
                _refuse("objective", config.objective, f"does not combine with {key}=True")
        if config.ratio_clip_c is not None:
            _refuse("objective", config.objective, "has no dual clip; set ratio_clip_c to null")
    if config.objective == "gmpo":
        if config.token_level_loss:
            _refuse("objective", "gmpo", "is one ratio a response; set token_level_loss=False")
        if _is_number(config.ratio_clip_min) and config.ratio_clip_min >= 1:
            _refuse("ratio_clip_min", config.ratio_clip_min, "must be below 1 for gmpo")
    if config.loss_normalizer is not None and config.token_level_loss:
        _refuse(
            "loss_normalizer",
            config.loss_normalizer,
            "replaces the length of a response; set token_level_loss=False",
        )
    if config.token_veto_threshold is not None:
        if not config.use_importance_sampling_correction:
            _refuse(
                "token_veto_threshold",
                config.token_veto_threshold,
                "needs use_importance_sampling_correction=True",
            )
        if config.sequence_level_importance_ratios:
            _refuse(
                "token_veto_threshold",
                config.token_veto_threshold,
                "reads token-level weights; set sequence_level_importance_ratios=False",
            )


_CHECKS: tuple[Callable[[LossConfig], None], ...] = (
    _check_types,
    _check_ranges,
    _check_ratio,
    _check_truncation,
    _check_rejection,
    _check_beyond,
)
