"""Host memory while a large sharded checkpoint is read onto a mesh of CPU devices.

    python scripts/measure_import.py [--gigabytes 2.2] [--devices 8]

Makes a random checkpoint in bfloat16 files, reads it as float32 onto the mesh in a process of its
own, and samples that process's anonymous memory (RssAnon: what is allocated, not the pages of the
mapped files, which the system takes back when it needs them). On a CPU the shards lie in the same
memory, so what the import itself needs is the peak less the bytes of the shards.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def memory() -> int:
    """Anonymous memory of this process, bytes."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def shape_of(gigabytes: float):
    """A Llama of about this many bytes in bfloat16, an eighth of them in its table."""
    from grpo_jax.models import presets, transformer

    shape = presets.preset(
        "tiny",
        vocab_size=49_152,
        hidden_size=2048,
        intermediate_size=5632,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        num_layers=1,
        param_dtype="bfloat16",
        compute_dtype="bfloat16",
    )
    import dataclasses

    one = transformer.parameter_count(shape)
    each = transformer.parameter_count(dataclasses.replace(shape, num_layers=2)) - one
    layers = max(1, -(-int(gigabytes * 5e8 - (one - each)) // each))
    return dataclasses.replace(shape, num_layers=layers)


def write(folder: Path, gigabytes: float) -> None:
    """Write the checkpoint, tensor by tensor."""
    import jax
    import numpy as np

    from grpo_jax.models import hf, transformer

    shape = shape_of(gigabytes)
    rng = np.random.default_rng(0)

    def leaf(x):
        bits = rng.integers(0, 2**14, x.shape, dtype=np.uint16)  # bfloat16 of 0 up to 2
        return bits.view(x.dtype)

    params = jax.tree.map(leaf, transformer.abstract_params(shape))
    hf.save_model(folder, shape, params, max_shard_bytes=500_000_000)


def read(folder: Path) -> None:
    """Read it and print figures; the last line is JSON."""
    import dataclasses

    import jax

    from grpo_jax.models import hf, hf_config
    from grpo_jax.scale import rules
    from grpo_jax.scale.mesh import MeshConfig, make_mesh

    shape = dataclasses.replace(hf_config.read_config(folder), param_dtype="float32")
    mesh = make_mesh(MeshConfig(tensor=2, fsdp=jax.device_count() // 2))
    jax.block_until_ready(jax.numpy.zeros(8))
    before, peak, done = memory(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    params = hf.load_params(folder, shape, lambda x: rules.partition(x, mesh))
    jax.block_until_ready(params)
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    held = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
    files = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    largest = shape.vocab_size * shape.hidden_size * 4
    extra = peak - before - held
    figures = {
        "checkpoint_bytes": files,
        "shards_bytes": held,
        "largest_tensor_bytes": largest,
        "extra_peak_bytes": extra,
        "extra_over_largest": round(extra / largest, 3),
        "seconds": round(seconds, 1),
    }
    print(f"{files / 1e9:.2f} GB of files -> {held / 1e9:.2f} GB of shards on {mesh.shape}")
    print(f"beside the shards: {extra / 1e6:.0f} MB at most; largest tensor {largest / 1e6:.0f} MB")
    print(json.dumps({"bench": "import", "figures": figures}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.read is not None:
        read(options.read)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write(folder, options.gigabytes)
        variables = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(options.devices),
        }
        command = [sys.executable, __file__, "--read", str(folder)]
        subprocess.run(command, check=True, env=variables)


if __name__ == "__main__":
    main()
