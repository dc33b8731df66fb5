"""What was trained -> folders that other tools open."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_jax.config import Config
from grpo_jax.core.policy import Params
from grpo_jax.data import tokenizer as tokenizers
from grpo_jax.models import hf, lora
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import multihost

Place = str | Path


def write(
    config: Config,
    shape: ModelConfig,
    tokenizer: tokenizers.Tokenizer,
    *,
    adapter: tuple[Place, Params] | None,
    model: tuple[Place, Params] | None,
    dtype: Any = None,
    say: Callable[[str, Place], None],
) -> None:
    """Write an adapter folder, a model folder, or both; all processes of a job call this.

    Args:
      config, shape, tokenizer: of the run.
      adapter: folder and adapter, for a `peft` folder; None writes none.
      model: folder and all weights, adapters beside them, for a Hugging Face folder with the
        tokenizer that was trained with; None writes none.
      dtype: of that folder's tensors; that of the weights if None.
      say: told what was written, and where.
    """
    if adapter is not None:
        place, trained = adapter[0], multihost.fetch(adapter[1])
        if multihost.is_main():
            lora.save_adapter(place, shape, trained, config.lora, config.model.path)
            say("the adapter", place)
    if model is None:
        return
    place, weights = model
    hf.save_model(place, shape, weights, dtype=dtype, companions=config.model.path)
    if multihost.is_main():
        if config.tokenizer.path is not None or config.tokenizer.chat_template is not None:
            tokenizer.save(place)
        say("the weights", place)
