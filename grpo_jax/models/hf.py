"""Hugging Face model folders, in and out.

A folder holds config.json and either model.safetensors or model.safetensors.index.json with its
shards. Tensors keep their [out, in] layout, so a round trip is exact to the bit; the layers of the
file are stacked into the leading axis [L, ...] of ours.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from grpo_jax.core.policy import CacheDtype, Decoder, Params, Policy
from grpo_jax.models import cache, hf_config, hf_names, hf_shards, hf_write, hub, transformer
from grpo_jax.models.model_config import AttentionName, Dtype, ModelConfig, Remat
from grpo_jax.scale import multihost

SINGLE, INDEX = hf_write.SINGLE, hf_write.INDEX
DEFAULT_SHARD_BYTES = 5_000_000_000

# What may stand beside the weights and belongs to the model: copied on export where asked for.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


Place = Callable[[Any], Any]
"""Shapes of the parameters -> a tree of `jax.sharding.Sharding`."""


class LoadedModel(NamedTuple):
    """A model ready for use: what it is, the pure functions, and the weights."""

    config: ModelConfig
    policy: Policy
    decoder: Decoder
    params: Params


def load_model(
    folder: str | Path,
    *,
    dtype: Dtype | None = None,
    compute_dtype: Dtype | None = None,
    remat: Remat = "none",
    attention: AttentionName = "auto",
    freeze_router: bool = False,
    cache_dtype: CacheDtype = "model",
    place: Place | None = None,
) -> LoadedModel:
    """Load a Hugging Face folder of a supported architecture.

    Args:
      folder: holds config.json and safetensors weights; or a name of the hub (`hub.local_folder`).
      dtype: of the parameters; the stored one if None (float16 is widened to float32).
      compute_dtype: of the activations; `dtype` if None.
      remat: what the backward pass recomputes, see `model_config.REMAT_NAMES`.
      attention: how whole rows attend, see `attention`.
      freeze_router: give the router of routed experts no gradient.
      cache_dtype: what the decoder holds keys and values in.
      place: shapes of the parameters -> where each of them lives; the default device if None.

    Raises:
      FileNotFoundError: folder, config.json, weights or a shard are not there.
      ValueError: unsupported architecture or field, damaged file, or tensors that are missing, left
        over or of another shape; always by name.
    """
    config = hf_config.read_config(folder)
    param_dtype = dtype or config.param_dtype
    config = dataclasses.replace(
        config,
        param_dtype=param_dtype,
        compute_dtype=compute_dtype or param_dtype,
        remat=remat,
        attention=attention,
        freeze_router=freeze_router,
    )
    params = load_params(folder, config, place)
    decoder = cache.decoder_for(config, dtype=cache_dtype)
    return LoadedModel(config, transformer.policy_for(config), decoder, params)


def load_params(
    folder: str | Path,
    config: ModelConfig,
    place: Place | None = None,
    *,
    staging_bytes: int = hf_shards.STAGING_BYTES,
) -> Params:
    """Read the weights of `config` in its `param_dtype`; arguments and errors as `load_model`.

    Slices go from the files to the devices that hold them; see `hf_shards`.
    """
    folder = hub.local_folder(folder)
    wanted = transformer.abstract_params(config)
    here = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)  # a default may be set
    places = jax.tree.map(lambda _: here, wanted) if place is None else place(wanted)
    with contextlib.ExitStack() as stack:
        tensors = _open_all(folder, stack)
        _check_tensors(folder, config, wanted, tensors)

        def read(path, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
            names, inner = hf_names.file_names(path, leaf.shape, config)
            return hf_shards.read_array(tensors, names, leaf, inner, sharding, staging_bytes)

        return jax.tree.map_with_path(read, wanted, places)


def _open_all(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Open every weight file; return tensor name -> the open file that holds it."""
    tensors = {}
    for file in _weight_files(folder):
        try:
            opened = stack.enter_context(safe_open(file, framework="np"))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short: {error}") from error
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / INDEX} is damaged: {error!r}") from error
        gone = [name for name in names if not (folder / name).is_file()]
        if gone:
            raise FileNotFoundError(f"{folder / INDEX} names {gone[0]}, which is not there")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.gguf")
    )
    hint = f" (it has {others[0]}: convert it to safetensors)" if others else ""
    raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")


def _check_tensors(
    folder: Path, config: ModelConfig, wanted: Params, tensors: dict[str, Any]
) -> None:
    """Compare names and shapes before any weight is read."""
    shapes = {}
    for path, leaf in jax.tree.leaves_with_path(wanted):
        names, shape = hf_names.file_names(path, leaf.shape, config)
        shapes |= dict.fromkeys(names, shape)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ValueError(f"{folder}: {_some(missing)} missing from the weights")
    extra = [name for name in tensors if name not in shapes and not _ignored(name)]
    if config.tie_embeddings and extra == ["lm_head.weight"]:
        _check_tied(folder, tensors)
    elif extra:
        raise ValueError(f"{folder}: {_some(extra)} in the weights, but not part of the model")
    for name, shape in shapes.items():
        found = tuple(tensors[name].get_slice(name).get_shape())
        if found != shape:
            raise ValueError(f"{folder}: {name} has shape {found}, config.json asks for {shape}")


def _check_tied(folder: Path, tensors: dict[str, Any]) -> None:
    """Let a tied model carry its head twice, as long as both are the same."""
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    shape = tensors[table].get_slice(table).get_shape()
    same = shape == tensors[head].get_slice(head).get_shape()
    if same:
        bounds = tuple(slice(0, size) for size in shape)
        pairs = zip(
            *(hf_shards.row_blocks(tensors, n, bounds, 2**22) for n in (table, head)), strict=True
        )
        same = all(np.array_equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
    if not same:
        raise ValueError(
            f"{folder}: tie_word_embeddings is true, but {head} differs from {table};"
            " set it to false in config.json if the head is meant to be separate"
        )


def _ignored(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")  # a constant that old versions stored


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def save_model(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    dtype: Dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    companions: str | Path | None = None,
) -> None:
    """Write a folder that `transformers` and `load_model` open; it appears complete or not at all.

    A tensor at a time leaves the devices (see `hf_write`). In a job of several processes all of
    them call this, and process 0 writes.

    Args:
      folder: where to write; an older export there is replaced once the new one is complete.
      config, params: the model; a matrix with an adapter beside it (`lora.attach`) is merged.
      dtype: of the tensors; that of `params` if None.
      max_shard_bytes: a larger model is cut into shards of at most this size (one tensor at least).
      companions: a folder whose tokenizer, chat template and generation config are copied along.

    Raises:
      ValueError: `folder` holds files that no export writes; `max_shard_bytes` is not positive.
    """
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive")
    stored = dataclasses.replace(config, param_dtype=dtype or _dtype_of(params))
    fields = hf_config.config_to_fields(stored)
    scratch = multihost.from_main(lambda: _make_scratch(folder), "the folder of an export")
    staged = scratch / "new"

    def finish() -> None:
        _write_json(staged / "config.json", fields)
        for name in COMPANIONS if companions is not None else ():
            source = hub.local_folder(str(companions)) / name
            if source.is_file():
                shutil.copyfile(source, staged / name)
        if folder.exists():
            os.rename(folder, scratch / "old")
        os.rename(staged, folder)

    try:
        tensors = hf_write.tensors_of(config, params, dtype)
        write = lambda: hf_write.write_shards(staged, tensors, max_shard_bytes)  # noqa: E731
        multihost.all_succeed(write, "the weights of an export")
        multihost.from_main(finish, "the end of an export")
    finally:
        if multihost.is_main():
            shutil.rmtree(scratch, ignore_errors=True)


def _make_scratch(folder: Path) -> Path:
    """Make a folder beside `folder`, to be filled and renamed."""
    _refuse_foreign_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    (scratch / "new").mkdir()
    return scratch


def _refuse_foreign_files(folder: Path) -> None:
    """Never delete what somebody else put there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the export a folder of its own")
    known = {*COMPANIONS, "config.json", INDEX}
    for path in folder.iterdir():
        if path.name not in known and not path.match("model*.safetensors"):
            raise ValueError(
                f"{folder} holds {path.name}, which no export writes; choose another folder"
            )


def _dtype_of(params: Params) -> Any:
    return str(jax.tree.leaves(params)[0].dtype)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
