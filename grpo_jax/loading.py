"""Config -> model: weights, tokenizer, adapter, and their places on the mesh."""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import jax
import optax

from grpo_jax.config import Config, ConfigError
from grpo_jax.core import filtering
from grpo_jax.core.policy import Grafted, Params, Policy
from grpo_jax.data import tokenizer as tokenizers
from grpo_jax.models import hf, hub, lora
from grpo_jax.sampling.generate import SamplingConfig
from grpo_jax.scale import mesh as meshes
from grpo_jax.scale import rules
from grpo_jax.scale.rules import Rules, Say
from grpo_jax.train import state as states


def quiet(text: str) -> None:
    """Say nothing: what does not divide is said once, by the policy's own state."""
    del text


class Model(NamedTuple):
    """A loaded model with its tokenizer and its place on the devices."""

    loaded: hf.LoadedModel  # its weights are float32, and lie on the mesh already
    tokenizer: tokenizers.Tokenizer
    mesh: jax.sharding.Mesh
    sampling: SamplingConfig  # of the config, for as many tokens as the tokenizer knows
    adapter: Params | None = None  # what is trained in place of the weights
    scale: float = 1.0  # of the adapter's change
    rules: Rules = rules.LLAMA_RULES  # where parameters live

    def places(
        self, params: Params, transform: optax.GradientTransformation, *, say: Say | None = None
    ) -> states.Placement:
        """Where a state of these parameters (arrays, or their shapes) lives; `say` as in rules."""
        shapes = states.abstract(params, transform)
        return states.placement(shapes, transform, self.mesh, self.rules, say=say)

    @property
    def trained(self) -> Params:
        """What training begins with: the weights, or the adapter."""
        return self.loaded.params if self.adapter is None else self.adapter

    @property
    def policy(self) -> Policy | Grafted:
        """The policy of what is trained."""
        if self.adapter is None:
            return self.loaded.policy
        return lora.graft(self.loaded.policy, self.loaded.params, self.scale)

    def whole(self, trained: Params) -> Params:
        """What the decoder reads: all weights, without a copy of any."""
        if self.adapter is None:
            return trained
        return lora.attach(self.loaded.params, trained, self.scale)


def load_model(config: Config) -> Model:
    """Load weights and tokenizer, and check that they belong together."""
    mesh, table = meshes.make_mesh(config.mesh), rules.table(config.mesh)
    loaded = hf.load_model(
        config.model.path,
        dtype="float32",
        compute_dtype=config.model.compute_dtype,
        remat=config.model.remat,
        attention=config.model.attention,
        freeze_router=config.model.freeze_router,
        cache_dtype=config.engine.cache_dtype,
        # Once for all who read them: the state copies them, the reference policy shares them. What
        # does not divide is said by the state's rules.
        place=lambda shapes: rules.partition(shapes, mesh, table, say=quiet),
    )
    tokenizer = tokenizers.load_tokenizer(config.tokenizer, hub.local_folder(config.model.path))
    if tokenizer.vocab_size > loaded.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model "
            f"{loaded.config.vocab_size}; use the tokenizer that the model was trained with"
        )
    sampling = _for_vocabulary(config.sampling, tokenizer.vocab_size, loaded.config.vocab_size)
    return with_adapter(Model(loaded, tokenizer, mesh, sampling, rules=table), config)


def with_adapter(model: Model, config: Config) -> Model:
    """Give a model the new adapter that a config asks for, if it asks for one.

    Raises:
      ConfigError: the targets or the rank do not fit the model.
    """
    if not config.lora.on:
        return model
    if config.model.freeze_router:
        raise ConfigError(
            f"model.freeze_router = true says nothing with lora.rank = {config.lora.rank}: an "
            "adapter trains what lora.targets name; leave routers out of them, and this false"
        )
    key = jax.random.fold_in(jax.random.key(config.run.seed), 2**31 - 2)
    try:
        adapter = lora.init_adapter(model.loaded.params, config.lora, key)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    places = rules.partition(adapter, model.mesh, model.rules, say=quiet)
    return model._replace(adapter=jax.device_put(adapter, places), scale=config.lora.scale)


def _for_vocabulary(sampling: SamplingConfig, known: int, vocabulary: int) -> SamplingConfig:
    """Rule out the ids that pad a model's matrix beyond the `known` ones of its tokenizer.

    They have random weights, no text, and would hold mass in sampler and trainer.
    """
    filtering.check_vocabulary(sampling.filter, known)
    if sampling.filter.vocabulary is None and known < vocabulary:
        filter = dataclasses.replace(sampling.filter, vocabulary=known)
        sampling = dataclasses.replace(sampling, filter=filter)
    return sampling


def fingerprint(path: str | Path) -> str:
    """A short name for the weights in a folder: sizes, and the first and last megabyte of each."""
    digest = hashlib.sha256()
    for file in sorted(hub.local_folder(path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(size - (1 << 20), 0))
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()[:16]
