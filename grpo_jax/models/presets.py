"""What a model is made of, as one frozen dataclass, and the named models that people ask for.

Symbols: `L` layers, `D` width, `F` width of the MLP, `H` query heads, `K` key-value heads, `hd`
width of a head, `V` vocabulary.
"""

import dataclasses
from typing import Literal

DTYPES = ("float32", "bfloat16", "float64")
REMAT_NAMES = ("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable")
FAMILIES = ("llama", "mistral", "qwen2")

Remat = Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]
Dtype = Literal["float32", "bfloat16", "float64"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched to reach beyond the length of pre-training.

    linear: every frequency is divided by `factor`.
    llama3: low frequencies are divided by `factor`, high ones kept, those between interpolated.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_length / this are divided
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_length / this are kept
    original_length: int = 8192  # tokens of context in pre-training


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family.

    Raises:
      ValueError: at construction, when the parts do not fit together or a name is unknown.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K; each serves H / K query heads
    head_dim: int  # hd
    max_length: int = 8192  # tokens that the model was made for; longer runs, but answers badly
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = True  # the head is the embedding table
    qkv_bias: bool = False  # Qwen2
    family: str = (
        "llama"  # Hugging Face's `model_type`; decides the name of the exported architecture
    )
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    initializer_range: float = 0.02  # standard deviation of fresh weights
    param_dtype: Dtype = "float32"  # of the parameters, so of their gradients and of what is saved
    compute_dtype: Dtype = (
        "float32"  # of activations; norms, RoPE, softmax, logits: float32 or wider
    )
    remat: Remat = "none"  # what the backward pass recomputes inside each layer

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        _check_name("param_dtype", self.param_dtype, DTYPES)
        _check_name("compute_dtype", self.compute_dtype, DTYPES)
        _check_name("remat", self.remat, REMAT_NAMES)
        _check_name("family", self.family, FAMILIES)
        if self.rope_scaling is not None:
            _check_name("rope_scaling.kind", self.rope_scaling.kind, ("linear", "llama3"))


def _check_name(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{field}={value!r} is not known; choose one of {', '.join(known)}")


def preset(name: str, **changes) -> ModelConfig:
    """Return the model of this name, with `changes` to its fields.

    Raises:
      ValueError: the name is unknown; the message lists those that are known.
    """
    _check_name("preset", name, tuple(PRESETS))
    return dataclasses.replace(PRESETS[name], **changes)


_LLAMA3_SCALING = RopeScaling("llama3", factor=32.0, original_length=8192)

PRESETS: dict[str, ModelConfig] = {
    # For tests and examples: 256 bytes and a few special tokens, milliseconds a step.
    "tiny": ModelConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=512,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    ),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ModelConfig(
        vocab_size=49_152,
        hidden_size=960,
        intermediate_size=2560,
        num_layers=32,
        num_heads=15,
        num_kv_heads=5,
        head_dim=64,
        rope_theta=100_000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ModelConfig(
        vocab_size=49_152,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=24,
        num_heads=32,
        num_kv_heads=32,
        head_dim=64,
        rope_theta=130_000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_length=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_SCALING,
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_length=131_072,
        rope_theta=500_000.0,
        rope_scaling=dataclasses.replace(_LLAMA3_SCALING, factor=8.0),
        tie_embeddings=False,
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ModelConfig(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_length=32_768,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
        qkv_bias=True,
        family="qwen2",
        bos_token_id=151_643,
        eos_token_ids=(151_645, 151_643),
    ),
}
