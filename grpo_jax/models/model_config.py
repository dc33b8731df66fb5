"""What a model is made of, as one frozen dataclass: sizes, and the switches between families.

Symbols: `L` layers, `D` width, `F` width of the MLP, `H` query heads, `K` key-value heads, `hd`
width of a head, `V` vocabulary.
"""

import dataclasses
from typing import Literal, get_args

Remat = Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]
AttentionName = Literal["auto", "dot_product", "blocked", "splash"]
Dtype = Literal["float32", "bfloat16", "float64"]
Activation = Literal["silu", "gelu_tanh"]
Scaling = Literal["linear", "dynamic", "llama3", "yarn"]
Kind = Literal["global", "local", "global_nope", "local_nope"]
"""How a layer attends: to all before it, or to a window; `nope`: without rotation (no RoPE)."""

DTYPES: tuple[str, ...] = get_args(Dtype)
REMAT_NAMES: tuple[str, ...] = get_args(Remat)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "qwen3_moe")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched to reach beyond the length of pre-training.

    linear: every frequency is divided by `factor`.
    dynamic: theta grows with the length of the sequence, once it is longer than `max_length`.
    llama3: low frequencies are divided by `factor`, high ones kept, those between interpolated.
    yarn: the same with a ramp over the dimensions, and attention made sharper (arXiv:2309.00071).
    """

    kind: Scaling
    factor: float
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_length / this are divided
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_length / this are kept
    original_length: int = 8192  # llama3, yarn: tokens of context in pre-training
    beta_fast: float = 32.0  # yarn: frequencies with more rotations over the old context are kept
    beta_slow: float = 1.0  # yarn: frequencies with fewer rotations than this are divided
    attention_factor: float | None = None  # yarn: of cos and sin; None = 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions

    def __post_init__(self) -> None:
        check_name("rope_scaling.kind", self.kind, get_args(Scaling))
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor={self.factor} must be at least 1")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: the Llama family, and the switches that make others of it.

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
    qk_norm: bool = False  # RMSNorm over each query and key head, before RoPE (Qwen3, Gemma 3)
    activation: Activation = "silu"  # of the MLP's gate
    sandwich_norms: bool = False  # norms after attention and after the MLP too (Gemma)
    centered_norms: bool = False  # norms multiply with 1 + scale (Gemma)
    scale_embeddings: bool = False  # embeddings are multiplied with sqrt(D) (Gemma)
    query_width: int | None = None  # scores are q k^T / sqrt(this); None: hd (Gemma)
    attention_soft_cap: float | None = None  # c: scores become c tanh(score / c) (Gemma 2)
    logit_soft_cap: float | None = None  # c: logits become c tanh(logit / c) (Gemma 2)
    num_experts: int = 0  # E; more than 0: routed experts in the place of each MLP (Qwen3-MoE)
    experts_per_token: int = 0  # k
    expert_size: int = 0  # width of an expert's MLP; intermediate_size is then not used
    normalize_experts: bool = False  # the weights of a token's k experts add up to 1
    freeze_router: bool = False  # the router's weights get no gradient
    pattern: tuple[Kind, ...] = ("global",)  # layer i is of kind pattern[i % len(pattern)]
    window: int | None = None  # tokens that a local layer sees, itself among them
    local_rope_theta: float | None = None  # of local layers, unscaled; None: as others (Gemma 3)
    # Hugging Face's `model_type`; decides the name of the exported architecture
    family: str = "llama"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    initializer_range: float = 0.02  # standard deviation of fresh weights
    param_dtype: Dtype = "float32"  # of the parameters, so of their gradients and of what is saved
    compute_dtype: Dtype = (
        "float32"  # of activations; norms, RoPE, softmax, logits: float32 or wider
    )
    remat: Remat = "none"  # what the backward pass recomputes inside each layer
    attention: AttentionName = "auto"  # how whole rows attend; see `attention`

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
        check_name("param_dtype", self.param_dtype, DTYPES)
        check_name("compute_dtype", self.compute_dtype, DTYPES)
        check_name("remat", self.remat, REMAT_NAMES)
        check_name("attention", self.attention, get_args(AttentionName))
        check_name("family", self.family, FAMILIES)
        check_name("activation", self.activation, get_args(Activation))
        for name in ("query_width", "attention_soft_cap", "logit_soft_cap", "local_rope_theta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or null")
        self._check_pattern()
        self._check_experts()

    def _check_pattern(self) -> None:
        if not self.pattern:
            raise ValueError("pattern=() names no kind of layer; ('global',) is the ordinary one")
        for kind in self.pattern:
            check_name("pattern", kind, get_args(Kind))
        local = any(is_local(kind) for kind in self.pattern)
        if local and (self.window is None or self.window < 1):
            raise ValueError(f"window={self.window}: local layers need one of at least 1 token")
        if self.window is not None and not local:
            raise ValueError(f"window={self.window} has no local layer in pattern={self.pattern}")

    def _check_experts(self) -> None:
        if self.num_experts:
            if not 1 <= self.experts_per_token <= self.num_experts:
                raise ValueError(
                    f"experts_per_token={self.experts_per_token} must be from 1 to"
                    f" num_experts={self.num_experts}"
                )
            if self.expert_size < 1:
                raise ValueError(f"expert_size={self.expert_size} must be at least 1")
            return
        for name in ("experts_per_token", "expert_size", "normalize_experts", "freeze_router"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} needs routed experts, and num_experts=0"
                )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The different kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @property
    def layer_kinds(self) -> tuple[Kind, ...]:
        """The kind of each of the L layers."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))


def is_local(kind: Kind) -> bool:
    """Say whether a layer of this kind sees a window only."""
    return kind.startswith("local")


def has_rope(kind: Kind) -> bool:
    """Say whether a layer of this kind rotates its queries and keys."""
    return not kind.endswith("nope")


def check_name(field: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is known."""
    if value not in known:
        raise ValueError(f"{field}={value!r} is not known; choose one of {', '.join(known)}")
