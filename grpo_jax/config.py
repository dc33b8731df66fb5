"""One tree of frozen dataclasses, read from YAML and from the command line.

Each module owns its own section; this file composes them, loads them, and checks what no single
section can see. Nobody else reads YAML.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from grpo_jax.core.advantages import AdvantageConfig, validate_group_size
from grpo_jax.core.estimators_group import weigh_components
from grpo_jax.core.losses import LossConfig
from grpo_jax.data.packing import PackingConfig
from grpo_jax.data.prompts import PromptConfig
from grpo_jax.data.tokenizer import TokenizerConfig
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.model_config import AttentionName, Dtype, Remat
from grpo_jax.rewards.scoring import RewardConfig
from grpo_jax.rewards.shaping import ShapingConfig
from grpo_jax.sampling.engine import EngineConfig
from grpo_jax.sampling.generate import SamplingConfig
from grpo_jax.scale.mesh import MeshConfig
from grpo_jax.scale.multihost import ProcessesConfig
from grpo_jax.train.checkpoint import CheckpointConfig
from grpo_jax.train.critic import CriticConfig
from grpo_jax.train.evaluate import EvaluateConfig, metric_names
from grpo_jax.train.filters import FiltersConfig
from grpo_jax.train.loop import RunConfig
from grpo_jax.train.optimizer import OptimizerConfig
from grpo_jax.train.reporting import ReportConfig
from grpo_jax.train.rollout import RolloutConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says which key, why, and the way out."""


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """Which weights are trained, and how they are computed with; the masters are float32."""

    path: str = "models/SmolLM2-135M-Instruct"  # Hugging Face folder, or name on the hub
    compute_dtype: Dtype = "float32"  # of activations: float32 or bfloat16
    remat: Remat = "none"  # what the backward pass recomputes inside each layer
    attention: AttentionName = "auto"  # auto, dot_product, blocked, splash (TPU)
    freeze_router: bool = False  # the router of routed experts is not trained


@dataclasses.dataclass(frozen=True)
class TeacherSection:
    """The model that the estimator opd distils from; it reads the policy's token ids."""

    path: str | None = None  # Hugging Face folder with the same tokenizer; null = no teacher
    compute_dtype: Dtype | None = None  # of activations; null = model.compute_dtype


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run is decided by. `configs/base.yaml` lists every key with its default."""

    run: RunConfig = RunConfig()
    model: ModelSection = ModelSection()
    lora: LoraConfig = LoraConfig()
    teacher: TeacherSection = TeacherSection()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    packing: PackingConfig = PackingConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    shaping: ShapingConfig = ShapingConfig()
    filters: FiltersConfig = FiltersConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    loss_fn: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    mesh: MeshConfig = MeshConfig()
    processes: ProcessesConfig = ProcessesConfig()


def load(path: str | Path | None = None) -> Config:
    """Read a YAML file over the defaults; `None` gives the defaults."""
    if path is None:
        return Config()
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} is not there; see configs/ for examples")
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {str(path)!r} is not valid YAML: {error}") from error
    return from_dict(data, source=str(path))


def from_dict(data: Mapping[str, Any], source: str = "config") -> Config:
    """Build a `Config` from nested plain values, naming every key that does not belong."""
    return _convert(data, Config, "", source)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values that `from_dict` turns back into an equal config."""
    return to_plain(dataclasses.asdict(config))


def dump(config: Config) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that the command line understands, e.g. `optimizer.lr`."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from keys(value, name + ".")
        elif isinstance(value, tuple) and any(dataclasses.is_dataclass(v) for v in value):
            for i, item in enumerate(value):
                yield from keys(item, f"{name}.{i}.")
        else:
            yield name
            if isinstance(value, Mapping):
                yield from (f"{name}.{key}" for key in value)


def value_of(config: Any, key: str) -> Any:
    """What stands under a dotted key that `keys` named."""
    for part in key.split("."):
        if isinstance(config, Mapping):
            config = config[part]
        else:
            config = config[int(part)] if isinstance(config, tuple) else getattr(config, part)
    return config


def differences(a: Config, b: Config, ignore: tuple[str, ...] = ()) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, apart from those that start with a prefix in `ignore`."""
    left, right = _flatten(to_dict(a)), _flatten(to_dict(b))
    names = (
        [k for k in {**left, **right} if not k.startswith(ignore)] if ignore else {**left, **right}
    )
    missing = object()
    return {
        k: (left.get(k), right.get(k))
        for k in names
        if left.get(k, missing) != right.get(k, missing)
    }


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is close."""
    known = list(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not match:  # the right word in the wrong section
        tail = name.rsplit(".", 1)[-1]
        match = sorted((k for k in known if k.rsplit(".", 1)[-1] == tail), key=len)[:1]
    return f" Did you mean {match[0]!r}?" if match else ""


def to_plain(value: Any) -> Any:
    """Tuples and mappings as lists and dicts, as YAML has them."""
    if isinstance(value, Mapping):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        parts = (_flatten(v, f"{prefix}{k}.") for k, v in value.items())
        return {k: v for part in parts for k, v in part.items()}
    return {prefix[:-1]: value}


def _convert(value: Any, hint: Any, where: str, source: str) -> Any:
    """Turn plain YAML values into what the type `hint` asks for, or say what is wrong with them."""
    if dataclasses.is_dataclass(hint):
        return _convert_dataclass(value, typing.cast(type, hint), where, source)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, hint, args, where, source)
    if origin is Literal:
        if value not in args:
            close = nearest(str(value), [str(a) for a in args])
            raise ConfigError(
                f"{source}: {where} = {value!r} is not one of {', '.join(map(repr, args))}.{close}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(value, "a list", where, source)
        inner = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(inner) != len(value):
            raise _wrong_type(value, f"a list of {len(inner)}", where, source)
        pairs = enumerate(zip(value, inner, strict=True))
        return tuple(_convert(v, t, f"{where}[{i}]", source) for i, (v, t) in pairs)
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(value, "a mapping", where, source)
        return dict(value)
    return _convert_scalar(value, hint, where, source)


def _convert_dataclass(value: Any, cls: type, where: str, source: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong_type(value, "a mapping of keys", where or "the top level", source)
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in names:
            full, known = f"{prefix}{key}", list(keys(Config()))
            elsewhere = [name for name in known if name.endswith(f".{key}")]
            close = nearest(full, elsewhere) or nearest(str(key), names) or nearest(full, known)
            raise ConfigError(
                f"{source}: unknown key '{prefix}{key}'.{close} "
                f"Keys here: {', '.join(sorted(names))}."
            )
    fields = {k: _convert(v, hints[k], f"{prefix}{k}", source) for k, v in value.items()}
    try:
        return cls(**fields)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {where or 'config'}: {error}") from error


def _convert_union(value: Any, hint: Any, args: tuple, where: str, source: str) -> Any:
    if value is None and type(None) in args:
        return None
    errors = []
    for arg in (a for a in args if a is not type(None)):
        try:
            return _convert(value, arg, where, source)
        except ConfigError as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else _wrong_type(value, str(hint), where, source)


def _convert_scalar(value: Any, hint: Any, where: str, source: str) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
        try:
            value = float(value)
        except ValueError:
            raise _wrong_type(value, "a number", where, source) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise _wrong_type(value, words.get(hint, str(hint)), where, source)
    return value


def _wrong_type(value: Any, wanted: str, where: str, source: str) -> ConfigError:
    kind = "nothing" if value is None else type(value).__name__
    return ConfigError(f"{source}: {where} = {value!r} ({kind}) must be {wanted}")


def validate(config: Config) -> list[str]:
    """Refuse what no section can see by itself; return warnings about what biases training."""
    rollout, updates = config.rollout, config.rollout.updates_per_rollout
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    try:
        validate_group_size(config.advantage, rollout.completions_per_prompt)
    except ValueError as error:
        raise ConfigError(
            f"rollout.completions_per_prompt = {rollout.completions_per_prompt}: {error}"
        ) from error
    if rows % updates:
        raise ConfigError(
            f"rollout.prompts_per_step × rollout.completions_per_prompt = {rows} rows do not "
            f"divide into rollout.updates_per_rollout = {updates}; use a divisor of {rows}"
        )
    micro = rollout.micro_batch_size
    if micro is not None and not config.packing.enabled and (rows // updates) % micro:
        raise ConfigError(
            f"rollout.micro_batch_size = {micro} does not divide the {rows // updates} rows of an "
            f"update; use a divisor of {rows // updates}"
        )
    if config.loss_fn.force_on_policy_ratio and rollout.updates > 1:
        raise ConfigError(
            "loss_fn.force_on_policy_ratio = true with rollout.updates_per_rollout = "
            f"{updates} and rollout.epochs = {rollout.epochs}: the second update is no longer "
            "on-policy; set force_on_policy_ratio to false, or the two others to 1"
        )
    if config.sampling.filter.temperature == 0:
        raise ConfigError(
            "sampling.filter.temperature = 0 (greedy) gives every completion of a group the same "
            "text, and nothing to learn from; use a temperature above 0 (evaluation has its own)"
        )
    for key in ("drop_constant_groups", "use_dynamic_sampling"):
        if rollout.completions_per_prompt == 1 and getattr(config.filters, key):
            raise ConfigError(
                f"filters.{key} = true with rollout.completions_per_prompt = 1: one completion is "
                "always a constant group, so nothing would be left; set it to false"
            )
    if not config.lora.on:
        for key, (value, _) in differences(Config(lora=config.lora), Config()).items():
            raise ConfigError(
                f"{key} = {value!r} with lora.rank = 0: there is no adapter to read it; set "
                "lora.rank, or leave it out"
            )
    _check_estimator(config)
    _check_evaluation(config)
    return _warnings(config)


def _check_evaluation(config: Config) -> None:
    """Refuse to stop a run, or to keep a checkpoint, by a number that no evaluation reports."""
    columns = [component.column for component in config.reward.components]
    known = metric_names(config.evaluate, columns)
    for key, name, wanted in (
        ("evaluate.stop_metric", config.evaluate.stop_metric, True),
        ("checkpoint.metric", config.checkpoint.metric, config.checkpoint.keep_best > 0),
    ):
        evaluated = name is not None and (name.startswith("eval/") or key.startswith("evaluate"))
        if wanted and evaluated and name not in known:
            raise ConfigError(
                f"{key} = {name!r} is in no evaluation of this run.{nearest(str(name), known)} "
                f"There are {', '.join(n for n in known if not n.endswith(('/low', '/high')))}"
            )


def _evaluation_warnings(config: Config) -> list[str]:
    """Where an early stop or a best checkpoint cannot come to pass."""
    evaluate, checkpoint, found = config.evaluate, config.checkpoint, []
    if evaluate.stop_metric is not None and evaluate.every == 0:
        found.append(
            f"evaluate.stop_metric = {evaluate.stop_metric!r} is never looked at between start and "
            "end: evaluate.every is 0"
        )
    if checkpoint.keep_best and checkpoint.metric.startswith("eval/"):
        if evaluate.every == 0 or checkpoint.every % evaluate.every:
            found.append(
                f"checkpoint.keep_best = {checkpoint.keep_best} by {checkpoint.metric!r}: only "
                "checkpoints of steps that were evaluated can be best; make checkpoint.every = "
                f"{checkpoint.every} a multiple of evaluate.every = {evaluate.every}"
            )
    return found


def _check_estimator(config: Config) -> None:
    """Refuse estimators whose inputs a run does not make, and a KL that would get lost."""
    advantage, loss = config.advantage, config.loss_fn
    _check_teacher(config)
    _check_critic(config)
    if advantage.estimator == "gdpo":
        _check_components(config)
    if loss.use_kl_in_reward and not advantage.needs_reference:
        raise ConfigError(
            "loss_fn.use_kl_in_reward = true takes the KL out of the loss, and nothing puts it "
            "into the reward; set advantage.kl_in_reward and the estimator reinforce_plus_plus or "
            "gae"
        )
    if advantage.kl_in_reward > 0 and not advantage.needs_reference:
        raise ConfigError(
            f"advantage.kl_in_reward = {advantage.kl_in_reward} is read by reinforce_plus_plus and "
            f"gae only, not by {advantage.estimator!r}; set it to 0, or change the estimator"
        )


def _check_teacher(config: Config) -> None:
    """Refuse distillation without a teacher, a teacher nobody asks, and rewards nobody reads."""
    advantage, filters = config.advantage, config.filters
    if not advantage.needs_teacher:
        if config.teacher.path is not None:
            raise ConfigError(
                f"teacher.path = {config.teacher.path!r} is read by the estimator opd only, not by "
                f"{advantage.estimator!r}; set advantage.estimator to opd, or teacher.path to null"
            )
        return
    if config.teacher.path is None:
        raise ConfigError(
            f"advantage.estimator = {advantage.estimator!r} distils from a teacher, and "
            "teacher.path names none; set it to a Hugging Face folder with the same tokenizer"
        )
    for on, key in (
        (filters.use_dynamic_sampling, "filters.use_dynamic_sampling"),
        (filters.drop_constant_groups, "filters.drop_constant_groups"),
        (config.shaping.enabled, "shaping.enabled"),
        (config.shaping.scaling.enabled, "shaping.scaling.enabled"),
    ):
        if on:
            raise ConfigError(
                f"{key} = true chooses or changes rows by their rewards, which the estimator "
                f"{advantage.estimator!r} does not learn from; set it to false"
            )


def _check_components(config: Config) -> None:
    """Refuse what gdpo, which learns from each component by itself, cannot use."""
    columns = sorted(component.column for component in config.reward.components)
    try:
        weigh_components(dict.fromkeys(columns, np.zeros(0)), config.advantage.reward_weights)
    except ValueError as error:
        raise ConfigError(f"reward.components, advantage.reward_weights: {error}") from error
    if config.shaping.enabled:
        raise ConfigError(
            "shaping.enabled = true penalises the total reward, and the estimator 'gdpo' learns "
            "from the components instead; set it to false, and make the penalty a component of its "
            "own, such as kind: length"
        )


def _check_critic(config: Config) -> None:
    """Refuse a critic nobody asks, and one that is never followed by a policy."""
    if not config.advantage.needs_values:
        for key, (value, _) in differences(Config(critic=config.critic), Config()).items():
            raise ConfigError(
                f"{key} = {value!r} is read by the estimator gae only, not by "
                f"{config.advantage.estimator!r}; leave it out, or set advantage.estimator to gae"
            )
    elif config.critic.warmup_steps >= config.run.steps:
        raise ConfigError(
            f"critic.warmup_steps = {config.critic.warmup_steps} leaves none of run.steps = "
            f"{config.run.steps} to the policy; lower it, or raise run.steps"
        )


def _critic_warnings(config: Config) -> list[str]:
    """What makes the values of a critic wrong in silence."""
    critic, filters, found = config.critic, config.filters, []
    if critic.warmup_steps == 0:
        found.append(
            "critic.warmup_steps = 0: the critic begins with values of 0, and the policy trains on "
            "its first errors; some steps of warm-up train the critic alone"
        )
    if critic.value_loss.cliprange and config.rollout.updates == 1:
        found.append(
            f"critic.value_loss.cliprange = {critic.value_loss.cliprange} clips nothing: with one "
            "update a rollout no value has moved yet; raise rollout.epochs"
        )
    for key in ("drop_constant_groups", "use_dynamic_sampling"):
        if getattr(filters, key):
            found.append(
                f"filters.{key} = true shows the critic only prompts with unequal rewards, so its "
                "values are wrong for all others"
            )
    return found


def _warnings(config: Config) -> list[str]:
    found = _critic_warnings(config) if config.advantage.needs_values else []
    found += _evaluation_warnings(config)
    for name in ("advantage", "shaping", "filters"):
        section = getattr(config, name)
        for key, why in section.unread().items():
            found.append(f"{name}.{key} = {getattr(section, key)!r} changes nothing: {why}")
    for i, component in enumerate(config.reward.components):
        if config.advantage.estimator == "gdpo" and component.weight != 1:
            found.append(
                f"reward.components.{i}.weight = {component.weight} weighs the logged total only: "
                "the estimator 'gdpo' weighs components by advantage.reward_weights"
            )
    if config.advantage.needs_teacher and config.loss_fn.kl_on:
        found.append(
            f"loss_fn.reference_policy_kl_penalty = {config.loss_fn.reference_policy_kl_penalty} "
            "pulls towards the initial policy while the teacher pulls away from it; distillation "
            "alone has 0 there"
        )
    loss = config.loss_fn
    if loss.sequence_level_importance_ratios and loss.use_importance_sampling_correction:
        found.append(
            "loss_fn.sequence_level_importance_ratios (GSPO) with "
            "loss_fn.use_importance_sampling_correction: the importance weight is a product over "
            "the response, which vanishes or explodes with its length, while the ratio is a "
            "geometric mean; is_weight_ess and is_weight_overflow_tokens show it. "
            "truncated_importance_sampling_type tis or icepop bounds the product; a gate by the "
            "geometric mean (geo-rs, seq-mask-tis) needs token-level ratios"
        )
    if config.sampling.filter.active and not config.loss_fn.use_importance_sampling_correction:
        found.append(
            "sampling.filter keeps only part of the vocabulary; tokens that fall outside the "
            "trainer's own kept set leave the loss (policy_support_excluded_tokens counts them)"
        )
    if config.advantage.kl_in_reward > 0 and config.loss_fn.kl_on:
        found.append(
            "advantage.kl_in_reward and loss_fn.reference_policy_kl_penalty are both on: the KL "
            "is paid twice"
        )
    if config.sampling.min_new_tokens > 1:
        found.append(
            "sampling.min_new_tokens > 1 draws the first tokens from a distribution without stop "
            "tokens, which the trainer does not know: the ratio is biased there"
        )
    return found
