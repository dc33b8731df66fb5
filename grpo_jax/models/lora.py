"""LoRA: a policy becomes a policy of a small adapter over weights that stay as they are.

Of each target matrix W [out, in] the adapter holds A [r, in] and B [out, r] (Hu et al. 2021,
arXiv:2106.09685), and the model computes with

    W + (alpha / r) · B A        A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0 at first

so that the first step begins with exactly the base model. The base weights are frozen: they have
no gradient and no optimizer state, and the reference policy reads the very same arrays.

An adapter is a flat dict `{"layers.attention.query.weight": {"a": [L, r, in], "b": [L, out, r]}}`,
in float32. `attach` puts it beside the base weights, without a copy of either; what comes out goes
wherever the model's parameters go (policy, decoder). There is no dropout: it would make the
log-probabilities of sampler and trainer differ.
"""

import dataclasses
import json
import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from grpo_jax.core.policy import Grafted, Params, Policy
from grpo_jax.models import hf_names
from grpo_jax.models.low_rank import LowRank
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import rules

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Train a low-rank adapter and leave the model as it is."""

    rank: int = 0  # r of each adapted matrix; 0 trains all weights, without an adapter
    alpha: float = 32.0  # the change is alpha / rank times B A
    # regular expressions on parameter paths: which matrices get an adapter
    targets: tuple[str, ...] = (r"attention/(query|key|value|output)/", r"mlp/(gate|up|down)/")
    export: Literal["adapter", "merged", "both"] = "both"  # what a finished run writes

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"rank = {self.rank} is negative; 0 trains all weights")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha = {self.alpha} must be positive and finite")
        if not self.targets:
            raise ValueError("targets = () names no matrix; name one, or set rank to 0")
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"targets: {pattern!r} is no regular expression: {error}"
                ) from error

    @property
    def on(self) -> bool:
        """Whether there is an adapter."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def target_names(params: Params, config: LoraConfig) -> list[str]:
    """Name the matrices that get an adapter, as `layers.attention.query.weight`.

    Raises:
      ValueError: an expression matches nothing, or something that is no matrix of a linear layer.
    """
    paths = [(rules.path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
    chosen: dict[str, Any] = {}
    for pattern in config.targets:
        found = {name: x for name, x in paths if re.search(pattern, name)}
        # Biases of a target stay as they are, as everywhere in the field.
        found = {name: x for name, x in found.items() if not name.endswith("bias")}
        if not found:
            raise ValueError(
                f"lora.targets: {pattern!r} matches no weight; paths look like "
                f"{', '.join(name for name, _ in paths[:3])}"
            )
        chosen |= found
    for name, x in chosen.items():
        stacked = name.startswith("layers/")
        if x.ndim != 2 + stacked or re.search(r"(^|/)(embed|head)/", name):
            raise ValueError(
                f"lora.targets: {name} {tuple(x.shape)} is not the matrix of a linear layer; only "
                "those have adapters, so make the expressions narrower"
            )
        if config.rank > min(x.shape[-2:]):
            raise ValueError(
                f"lora.rank = {config.rank} is more than {name} {tuple(x.shape)} has; use "
                f"{min(x.shape[-2:])} or less"
            )
    return [name.replace("/", ".") for name, _ in paths if name in chosen]


def init_adapter(params: Params, config: LoraConfig, key: jax.Array) -> Params:
    """Draw an adapter that changes nothing yet, float32 (float64 beside float64 weights).

    Args:
      params: base weights, or their shapes.
      config: rank and targets.
      key: of the draws.

    Raises:
      ValueError: as `target_names`.
    """
    shapes = {
        rules.path_name(path).replace("/", "."): x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    adapter = {}
    for i, name in enumerate(target_names(params, config)):
        *stack, out, inputs = shapes[name].shape
        dtype = jnp.promote_types(shapes[name].dtype, jnp.float32)
        bound = inputs**-0.5
        draw = jax.random.fold_in(key, i)
        shape = (*stack, config.rank, inputs)
        adapter[name] = {
            "a": jax.random.uniform(draw, shape, dtype, -bound, bound),
            "b": jnp.zeros((*stack, out, config.rank), dtype),
        }
    return adapter


def attach(base: Params, adapter: Params, scale: float) -> Params:
    """Put an adapter beside the base weights; nothing is copied."""

    def one(path: Any, weight: jax.Array) -> jax.Array | LowRank:
        part = adapter.get(rules.path_name(path).replace("/", "."))
        return weight if part is None else LowRank(weight, part["a"], part["b"], scale)

    return jax.tree_util.tree_map_with_path(one, base)


def merge(base: Params, adapter: Params, scale: float) -> Params:
    """Add the adapter to the weights; what has no adapter is the base's own array."""
    return jax.tree.map(
        lambda x: x.merged() if isinstance(x, LowRank) else x,
        attach(base, adapter, scale),
        is_leaf=lambda x: isinstance(x, LowRank),
    )


def adapt(policy: Policy, base: Params, scale: float, *, merged: bool = False) -> Policy:
    """Make a policy of the adapter out of a policy of all weights.

    Args:
      policy: the model.
      base: its weights; frozen.
      scale: alpha / rank.
      merged: compute with W + scale · B A itself. For models that do not multiply with this
        package's layers, whose weights have to be arrays; it costs a copy of the target matrices
        and their gradients while a step runs.
    """
    join = merge if merged else attach

    def hidden(adapter: Params, tokens, positions, segment_ids) -> jax.Array:
        return policy.hidden(join(base, adapter, scale), tokens, positions, segment_ids)

    def head(adapter: Params) -> Any:
        del adapter  # targets are linear layers below the head
        return policy.head(base)

    def expert_counts(adapter: Params, tokens, positions, segment_ids) -> jax.Array:
        assert policy.expert_counts is not None
        return policy.expert_counts(join(base, adapter, scale), tokens, positions, segment_ids)

    return policy._replace(
        hidden=hidden,
        head=head,
        expert_counts=None if policy.expert_counts is None else expert_counts,
    )


def graft(policy: Policy, base: Params, scale: float, *, merged: bool = False) -> Grafted:
    """Do as `adapt` for compiled steps, which take the base weights as an argument."""
    return Grafted(lambda frozen: adapt(policy, frozen, scale, merged=merged), base)


def save_adapter(
    folder: str | Path, config: ModelConfig, adapter: Params, lora: LoraConfig, base_path: str
) -> None:
    """Write an adapter folder that `peft` loads; it appears complete or not at all.

    Args:
      folder: where to write; an older adapter there is replaced.
      config: the base model.
      adapter, lora: what was trained, and how.
      base_path: of the base model, for `AutoPeftModel`.

    Raises:
      ValueError: `folder` holds files that are no adapter's.
    """
    folder = Path(folder)
    foreign = [p.name for p in folder.glob("*") if p.name not in (WEIGHTS, CONFIG)]
    if foreign or folder.is_file():
        raise ValueError(
            f"{folder} holds {(foreign or ['a file'])[0]}, which no adapter export writes; choose "
            "another folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        staged = scratch / "new"
        staged.mkdir()
        tensors = peft_tensors(config, adapter)
        save_file(tensors, staged / WEIGHTS, metadata={"format": "pt"})
        (staged / WEIGHTS).chmod(0o644)  # safetensors leaves it readable by the owner only
        modules = sorted({name.rsplit(".", 3)[1] for name in tensors})
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_path,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "inference_mode": True,
            "target_modules": modules,
        }
        (staged / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(scratch / "old")
        staged.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def peft_tensors(config: ModelConfig, adapter: Params) -> dict[str, np.ndarray]:
    """Give every matrix of an adapter the name that `peft` has for it."""
    tensors = {}
    for target, parts in adapter.items():
        path = tuple(jax.tree_util.DictKey(part) for part in target.split("."))
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            array = np.asarray(parts[ours])
            names, shape = hf_names.file_names(path, array.shape, config)
            rows = np.ascontiguousarray(array).reshape(len(names), *shape)
            for name, row in zip(names, rows, strict=True):
                module = name.removesuffix(".weight")
                tensors[f"base_model.model.{module}.{theirs}.weight"] = row
    return tensors
