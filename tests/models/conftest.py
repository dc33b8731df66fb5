"""Tiny random models of `transformers`, as folders and as torch modules."""

import dataclasses
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import transformer
from tests.models.families import FAMILIES, SIZES

SMOLLM2 = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"


@dataclasses.dataclass(frozen=True)
class TorchModel:
    """A random model of `transformers`: its folder, and the module."""

    folder: Path
    module: object

    def logits(self, tokens, segment_ids):
        """Return logits of right-padded rows."""
        import torch

        with torch.no_grad():
            return self.with_gradient(tokens, segment_ids).numpy()

    def with_gradient(self, tokens, segment_ids):
        import torch

        mask = torch.tensor(np.asarray(segment_ids) > 0).long()
        return self.module(torch.tensor(np.asarray(tokens)).long(), attention_mask=mask).logits  # type: ignore

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the gradients under the names of files, which keep each expert by itself."""
        named = {}
        for name, weight in self.module.named_parameters():  # type: ignore
            gradient = weight.grad.numpy()
            if name.endswith("experts.gate_up_proj"):
                parts = {"gate_proj": 0, "up_proj": 1}
                halves = gradient.reshape(len(gradient), 2, -1, gradient.shape[-1])
            elif name.endswith("experts.down_proj"):
                parts, halves = {"down_proj": 0}, gradient[:, None]
            else:
                named[name] = gradient
                continue
            stem = name.rpartition(".")[0]
            for part, i in parts.items():
                named |= {f"{stem}.{e}.{part}.weight": half[i] for e, half in enumerate(halves)}
        return named


@pytest.fixture(scope="session")
def torch_models(tmp_path_factory):
    """Make a function (family, dtype) -> TorchModel that builds each model once."""
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing them says is not ours
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    made = {}

    def make(family: str, dtype: str) -> TorchModel:
        if (family, dtype) not in made:
            kind, changes = FAMILIES[family]
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **{**SIZES, **changes})
            module = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
            for name, weight in module.named_parameters():
                if name.endswith("bias") or "norm" in name:  # born 0 or 1: would hide a mistake
                    torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
            module = module.to(getattr(torch, dtype)).eval()
            folder = tmp_path_factory.mktemp(f"{family}-{dtype}")
            module.save_pretrained(folder)
            made[family, dtype] = TorchModel(folder, module)
        return made[family, dtype]

    return make


@pytest.fixture(scope="session")
def draw():
    """Make a function config -> random parameters, without a program to compile."""

    def make(config, seed: int = 0):
        rng = np.random.default_rng(seed)

        def leaf(path, shape):
            mean = float("scale" in str(path))  # norms are around 1
            return jnp.asarray(rng.normal(mean, 0.2, shape.shape), shape.dtype)

        return jax.tree.map_with_path(leaf, transformer.abstract_params(config))

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of the real model that scripts/fetch_smollm2.py writes."""
    if not (SMOLLM2 / "model.safetensors").is_file():
        pytest.skip("models/SmolLM2-135M-Instruct is not there: run scripts/fetch_smollm2.py")
    return SMOLLM2


@pytest.fixture
def rows():
    """Make a function (vocab, lengths, width) -> right-padded tokens, positions, segment ids."""

    def make(vocab: int, lengths: list[int], width: int, seed: int = 0):
        tokens = np.random.default_rng(seed).integers(3, vocab, (len(lengths), width))
        positions = np.broadcast_to(np.arange(width), tokens.shape)
        segment_ids = (positions < np.array(lengths)[:, None]).astype(np.int32)
        return (
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(positions, jnp.int32),
            jnp.asarray(segment_ids),
        )

    return make
