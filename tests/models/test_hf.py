"""Hugging Face folders: exact round trips, and every kind of damage refused by name."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.models import hf, hf_config, model_config, presets
from tests.models.families import FAMILIES, LENGTHS


@pytest.fixture
def make(draw):
    """Make a function changes -> (config, params) of a tiny model."""

    def of(**changes):
        config = presets.preset("tiny", bos_token_id=1, eos_token_ids=(2, 3), **changes)
        return config, draw(config)

    return of


@pytest.fixture
def folder(tmp_path, make):
    """An untied, biased model in one file."""
    config, params = make(tie_embeddings=False, qkv_bias=True, family="qwen2")
    hf.save_model(tmp_path / "model", config, params)
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder, change):
    tensors = load_file(folder / hf.SINGLE)
    change(tensors)
    save_file(tensors, folder / hf.SINGLE)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [hf.DEFAULT_SHARD_BYTES, 50_000])
def test_round_trip_is_exact(tmp_path, dtype, max_shard_bytes, make):
    scaling = model_config.RopeScaling("llama3", 8.0, 1.0, 4.0, 128)
    config, params = make(
        param_dtype=dtype, compute_dtype=dtype, rope_scaling=scaling, tie_embeddings=False
    )
    hf.save_model(tmp_path / "m", config, params, max_shard_bytes=max_shard_bytes)
    model = hf.load_model(tmp_path / "m")
    assert model.config == config
    assert_same(model.params, params)
    shards = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    if max_shard_bytes == 50_000:
        sizes = [
            sum(t.nbytes for t in load_file(tmp_path / "m" / name).values()) for name in shards
        ]
        assert len(shards) > 2 and all(size <= 50_000 or size == 264 * 64 * 4 for size in sizes)
    else:
        assert shards == ["model.safetensors"]


def test_dtype_on_load(folder):
    stored = hf.load_model(folder)
    assert stored.config.param_dtype == stored.config.compute_dtype == "float32"
    half = hf.load_model(folder, dtype="bfloat16", remat="full")
    assert half.config.compute_dtype == "bfloat16" and half.config.remat == "full"
    assert_same(half.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), stored.params))
    mixed = hf.load_model(folder, dtype="float32", compute_dtype="bfloat16")
    assert (mixed.config.param_dtype, mixed.config.compute_dtype) == ("float32", "bfloat16")


def test_float16_is_widened_to_float32(folder):
    edit_config(folder, dtype="float16", torch_dtype="float16")
    edit_weights(folder, lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}))
    model = hf.load_model(folder)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"float32"}


@pytest.mark.torch
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "linear"}))
def test_transformers_opens_an_export_and_gives_the_same_logits(
    tmp_path, torch_models, rows, family
):
    transformers = pytest.importorskip("transformers")
    torch_model = torch_models(family, "float32")
    model = hf.load_model(torch_model.folder)
    hf.save_model(tmp_path / "out", model.config, model.params, max_shard_bytes=20_000)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = dict(torch_model.module.state_dict())
    for name, tensor in again.state_dict().items():
        assert (tensor == theirs[name]).all(), name
    tokens, _, segment_ids = rows(97, LENGTHS[family], 40)
    found = type(torch_model)(tmp_path, again.eval()).logits(tokens, segment_ids)
    # The same kernels on the same numbers, in another process of loading: float32 rounding.
    np.testing.assert_allclose(found, torch_model.logits(tokens, segment_ids), atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_survives_import_and_export_to_the_bit(tmp_path, torch_models, family):
    folder = torch_models(family, "bfloat16").folder
    model = hf.load_model(folder)
    assert model.config.param_dtype == "bfloat16"
    hf.save_model(tmp_path / "out", model.config, model.params)
    stored, written = load_file(folder / hf.SINGLE), load_file(tmp_path / "out" / hf.SINGLE)
    assert stored.keys() == written.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == jnp.bfloat16
        assert tensor.tobytes() == written[name].tobytes(), name
    assert hf.load_model(tmp_path / "out").config == model.config


def test_companions_are_copied_and_an_old_export_is_replaced(tmp_path, folder, make):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    config, params = make()
    hf.save_model(tmp_path / "out", config, params, max_shard_bytes=50_000)
    hf.save_model(tmp_path / "out", config, params, companions=folder)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", hf.SINGLE, "tokenizer.json", "chat_template.jinja"}


def test_a_save_that_fails_leaves_the_old_export_and_nothing_else(
    tmp_path, folder, monkeypatch, make
):
    before = hf.load_model(folder).params

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "_write_json", full)
    config, params = make()
    with pytest.raises(OSError, match="No space left"):
        hf.save_model(folder, config, params)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same(hf.load_model(folder).params, before)


def test_a_save_never_deletes_what_it_did_not_write(tmp_path, folder, make):
    config, params = make()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds thesis.tex, which no export writes"):
        hf.save_model(folder, config, params)
    with pytest.raises(ValueError, match="config.json is a file; give the export a folder"):
        hf.save_model(folder / "config.json", config, params)
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be positive"):
        hf.save_model(tmp_path / "new", config, params, max_shard_bytes=0)


def test_what_is_not_there(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        hf.load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty is not a model folder: it has no config"):
        hf.load_model(tmp_path / "empty")
    (folder / hf.SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"has neither model.safetensors nor .*pytorch_model.bin: convert"
    ):
        hf.load_model(folder)


def test_a_shard_is_gone(tmp_path, make):
    config, params = make()
    hf.save_model(tmp_path / "m", config, params, max_shard_bytes=50_000)
    gone = sorted((tmp_path / "m").glob("model-*"))[1]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=f"names {gone.name}, which is not there"):
        hf.load_model(tmp_path / "m")
    (tmp_path / "m" / hf.INDEX).write_text("[]")
    with pytest.raises(ValueError, match="index.json is damaged"):
        hf.load_model(tmp_path / "m")


@pytest.mark.parametrize("keep", [4, 100, 100_000])
def test_weights_cut_short(folder, keep):
    with (folder / hf.SINGLE).open("r+b") as file:
        file.truncate(keep)
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        hf.load_model(folder)


NORM = "model.norm.weight"
BIAS = "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"{NORM} is missing from the weights"),
        (lambda t: [t.pop(NORM), t.pop(BIAS)], f"{BIAS}, {NORM} are missing"),
        (lambda t: t.update(lora=t[NORM]), "lora is in the weights, but not part of the model"),
        (
            lambda t: t.update({NORM: t[NORM][:5].copy()}),
            rf"{NORM} has shape \(5,\), config.json asks for \(64,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        hf.load_model(folder)


def test_a_tied_model_may_carry_its_head_only_if_it_is_the_same(tmp_path, make):
    config, params = make()
    hf.save_model(tmp_path / "m", config, params)
    table = "model.embed_tokens.weight"
    edit_weights(tmp_path / "m", lambda t: t.update({"lm_head.weight": t[table].copy()}))
    assert_same(hf.load_model(tmp_path / "m").params, params)
    edit_weights(tmp_path / "m", lambda t: t.update({"lm_head.weight": t[table] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        hf.load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; these are: L",
        ),
        ({"architectures": None, "model_type": "mamba"}, "model_type='mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*bits.* is not supported"),
        ({"final_logit_softcapping": 30.0}, "the field 'final_logit_softcapping' .* is not supp"),
        ({"_attention_sinks": 4}, "the field '_attention_sinks' .* is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["chunked_attention"]}, "layer_types with 'chunked_attention' is not"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type='longrope' is not"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "the field 'factor' of 'yarn' is missing"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1.0}},
            "the field 'mscale' of 'yarn' is not supported",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
        ({"torch_dtype": None, "dtype": "int8"}, "param_dtype='int8' is not known"),
        ({"num_attention_heads": 5}, "num_heads=5 must be a multiple of num_kv_heads=2"),
    ],
)
def test_what_config_json_asks_for_in_vain_is_named(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        hf.load_model(folder)


LEFT_OUT = {  # what is needed; no number is a default's
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 24,
    "num_hidden_layers": 7,
    "num_attention_heads": 64,
}


@pytest.mark.parametrize("kind", hf_config.FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_takes(kind):
    """The config of nothing but sizes, against the one that transformers fills up."""
    transformers = pytest.importorskip("transformers")
    architecture = hf_config.FAMILIES[kind].architecture
    specials = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    full = transformers.AutoConfig.for_model(kind, **LEFT_OUT, **specials).to_dict()
    names = {"architectures": [architecture], "model_type": kind}
    found = hf_config.config_from_fields({**LEFT_OUT, **names})
    assert found == hf_config.config_from_fields({**full, **names, **specials})
    if kind in ("gemma2", "gemma3_text"):
        assert {"local", "global"} == set(found.layer_kinds)


QWEN3_MOE = {
    **LEFT_OUT,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: only 1 is"),
        ({"mlp_only_layers": [0, 3]}, r"mlp_only_layers=\[0, 3\] is not supported: only \[\] is"),
        ({"shared_expert_intermediate_size": 8}, "the field 'shared_expert_intermediate_size'"),
        ({"n_group": 4}, "the field 'n_group' .* is not supported"),
    ],
)
def test_experts_with_dense_layers_among_them_are_refused_by_name(changes, message):
    assert hf_config.config_from_fields(QWEN3_MOE).num_experts == 128
    with pytest.raises(ValueError, match=message):
        hf_config.config_from_fields({**QWEN3_MOE, **changes})


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}


def test_what_gemma_3_leaves_out_is_what_transformers_takes():
    config = hf_config.config_from_fields(GEMMA3)
    assert config.layer_kinds == ("local",) * 5 + ("global", "local")
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert (config.window, config.head_dim, config.query_width) == (4096, 256, 256)
    assert config.tie_embeddings and config.logit_soft_cap is None


def test_the_other_names_of_gemmas_window_are_read():
    """Gemma 2's folders name it twice; newer ones of Gemma 3 give the pattern an underscore."""
    gemma2 = {**GEMMA3, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    twice = {"sliding_window": 64, "sliding_window_size": 64}
    assert hf_config.config_from_fields({**gemma2, **twice}).window == 64
    with pytest.raises(ValueError, match="sliding_window_size=32 beside sliding_window=64 is not"):
        hf_config.config_from_fields({**gemma2, **twice, "sliding_window_size": 32})
    pattern = hf_config.config_from_fields({**GEMMA3, "_sliding_window_pattern": 2}).layer_kinds
    assert pattern == ("local", "global") * 3 + ("local",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supp"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported: only 'gelu_"),
        ({"vision_config": {}}, "the field 'vision_config' .* is not supported"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type='linear' of sliding_attention is not supported",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            "rope_type='longrope' is not supported",
        ),
    ],
)
def test_what_gemma_3_asks_for_in_vain_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_config.config_from_fields({**GEMMA3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "qk_norm=True cannot be written for family='llama', .* has False"),
        (
            {"pattern": ("local",), "window": 8},
            r"pattern=.'local', 'local'. cannot be written for family='llama', .* has .'global'",
        ),
        (
            {"pattern": ("local", "global"), "window": 8, "family": "mistral"},
            "pattern=.* cannot be written for family='mistral'",
        ),
        ({"pattern": ("global", "global_nope"), "family": "qwen3", "qk_norm": True}, "pattern="),
    ],
)
def test_a_switch_that_the_family_cannot_express_is_not_exported(make, changes, message):
    config, _ = make(**changes)
    with pytest.raises(ValueError, match=message):
        hf_config.config_to_fields(config)


def test_damaged_or_incomplete_config_json(folder):
    fields = json.loads((folder / "config.json").read_text())
    del fields["hidden_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="the field 'hidden_size' is missing"):
        hf.load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        hf.load_model(folder)
    shutil.rmtree(folder)
