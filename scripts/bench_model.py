"""Time the model (forward alone, and with its gradient) against transformers and against products.

    python scripts/bench_model.py [--model models/SmolLM2-135M-Instruct] [--rows 8] [--length 512]
                                  [--rounds 3] [--remat dots_with_no_batch_dims_saveable]

Both sides take the mean negative log-likelihood of the next token over the same random rows of the
same float32 weights, on one pinned core with one thread, and take turns; the losses and the
gradient of the embedding must agree. Each turn is a process of its own: in one process whoever came
second took half as long again. Ours is what a train step runs: micro-batches of a few rows whose
gradients are added up; with advantage 1 and without ratio or KL its loss (`single_pass`) is that
likelihood. transformers is given its fastest attention (sdpa). A time is CPU time of the process, a
result the median. The bound is the time that the matrix products take alone, each measured at its
own shape in the same run, three times over (forward, and two in the backward pass); attention
counts its two products below the diagonal at the throughput of the widest one. The last line is
one JSON object.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

CORE = sorted(os.sched_getaffinity(0))[-1]
os.sched_setaffinity(0, {CORE})
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from grpo_jax.core import masks  # noqa: E402
from grpo_jax.core.batch import Batch  # noqa: E402
from grpo_jax.core.filtering import FilterConfig  # noqa: E402
from grpo_jax.core.loss_config import LossConfig  # noqa: E402
from grpo_jax.core.single_pass import policy_loss  # noqa: E402
from grpo_jax.models import hf  # noqa: E402

torch.set_num_threads(1)


def wide_vectors() -> dict[str, int]:
    """Ask for 512-bit vectors where the processor has them: by itself XLA keeps to 256."""
    info = pathlib.Path("/proc/cpuinfo")
    has = info.exists() and "avx512f" in info.read_text()
    return {"xla_cpu_prefer_vector_width": 512} if has else {}


def ours(args, tokens: np.ndarray) -> dict:
    """Return name -> function: the loss, and the loss with all gradients."""
    model = hf.load_model(args.model, dtype="float32", remat=args.remat)
    rows = jnp.asarray(tokens)
    places = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
    segments, ones = jnp.ones_like(rows), jnp.ones(rows.shape)
    config = LossConfig(
        disable_ppo_ratio=True, reference_policy_kl_penalty=0.0, metrics_level="minimal"
    )

    batch = Batch(
        tokens=rows, segment_ids=segments, positions=places, token_mask=places > 0,
        sample_weights=ones, advantages=ones, generation_logprobs=ones, prev_logprobs=ones,
    )  # fmt: skip
    counts = masks.count(batch)

    parts = jax.tree.map(lambda x: x.reshape(-1, args.micro_rows, x.shape[1]), batch)

    def loss(params, part):
        return policy_loss(
            model.policy, params, part, counts, config,
            filter=FilterConfig(), chunk_size=args.head_chunk,
        )[0]  # fmt: skip

    def summed(function):
        def run(params):
            def add(total, part):
                return jax.tree.map(jnp.add, total, function(params, part)), None

            start = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, params, part_shape))
            return jax.lax.scan(add, start, parts)[0]

        return run

    part_shape = jax.tree.map(lambda x: x[0], parts)
    both = {}
    for name, function in (("forward", loss), ("gradient", jax.value_and_grad(loss))):
        function = summed(function)
        program = jax.jit(function, compiler_options=wide_vectors())
        program = program.lower(model.params).compile()
        mib = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"  {name}: the compiler plans {mib:.0f} MiB of temporaries", file=sys.stderr)
        both[name] = lambda program=program: jax.block_until_ready(program(model.params))
    return both


def theirs(args, tokens: np.ndarray) -> dict:
    """The same of transformers' module."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    rows = torch.tensor(tokens).long()

    def forward():
        with torch.no_grad():
            return model(rows, labels=rows, use_cache=False).loss.item()

    def gradient():
        model.zero_grad(set_to_none=True)
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        return loss.item(), model.model.embed_tokens.weight.grad.numpy()

    return {"forward": forward, "gradient": gradient}


def bound(args, config) -> tuple[float, float]:
    """Seconds of one forward pass's products alone, and their GFLOP/s."""
    tokens, width = args.rows * args.length, config.hidden_size
    heads, inner = config.num_heads * config.head_dim, config.intermediate_size
    kv = config.num_kv_heads * config.head_dim
    layers = config.num_layers
    shapes = {
        (width, heads): layers, (width, kv): 2 * layers, (heads, width): layers,
        (width, inner): 2 * layers, (inner, width): layers, (width, config.vocab_size): 1,
    }  # fmt: skip
    seconds, flops, fastest = 0.0, 0.0, 0.0
    for (inputs, outputs), times in shapes.items():
        x, w = jnp.ones((tokens, inputs)), jnp.ones((outputs, inputs))
        product = jax.jit(lambda x, w: x @ w.T)
        jax.block_until_ready(product(x, w))
        taken = min(clock(lambda p=product, x=x, w=w: jax.block_until_ready(p(x, w)))
                    for _ in range(3))  # fmt: skip
        work = 2 * tokens * inputs * outputs
        seconds, flops = seconds + times * taken, flops + times * work
        fastest = max(fastest, work / taken)
    attention = layers * 4 * args.rows * heads * args.length * (args.length + 1) / 2
    seconds, flops = seconds + attention / fastest, flops + attention
    return seconds, flops / seconds / 1e9


def clock(function) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def turn(args) -> None:
    """One side, alone in a process: print its times as JSON, write its answers to a file."""
    functions = (ours if args.side == "ours" else theirs)(args, random_tokens(args))
    times = {name: [] for name in functions}
    loss, grad = None, None
    for name, function in functions.items():
        for _ in range(2):
            start = time.process_time()
            answer = function()
            times[name].append(time.process_time() - start)
            print(f"  {args.side}, {name}: {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
        if name == "gradient":
            loss, grad = answer
    table = np.asarray(grad["embed"]["table"] if args.side == "ours" else grad)
    np.savez(args.answers, loss=float(loss), table=table)
    print(json.dumps(times))


def random_tokens(args) -> np.ndarray:
    vocabulary = hf.hf_config.read_config(args.model).vocab_size
    shape = (args.rows, args.length)
    return np.random.default_rng(0).integers(3, vocabulary, shape).astype(np.int32)


def check_agreement(mine, other) -> None:
    """Loss to 1e-5, gradient of the table to 1e-4 of its largest entry: long float32 sums."""
    np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-5)
    limit = 1e-4 * np.abs(other["table"]).max()
    np.testing.assert_allclose(mine["table"], other["table"], atol=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-rows", type=int, default=8)
    parser.add_argument("--head-chunk", type=int, default=512)
    parser.add_argument("--remat", default="dots_with_no_batch_dims_saveable")
    parser.add_argument("--side", choices=("ours", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--answers", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not pathlib.Path(args.model, "config.json").is_file():
        parser.error(f"{args.model} is not there; run scripts/fetch_smollm2.py --out {args.model}")
    if args.side:
        return turn(args)
    print(f"core {CORE}, one thread, float32, [{args.rows}, {args.length}]; jax {jax.__version__}, "
          f"torch {torch.__version__}, transformers {transformers.__version__}")  # fmt: skip
    products, speed = bound(args, hf.hf_config.read_config(args.model))
    print(f"products alone: forward {products:.2f} s, {speed:.0f} GFLOP/s", flush=True)
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {side: os.path.join(folder, f"{side}.npz") for side in ("ours", "transformers")}
        for number in range(args.rounds):
            for side, file in files.items():
                print(f"round {number + 1} of {args.rounds}", flush=True)
                command = [sys.executable, *sys.argv, "--side", side, "--answers", file]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                for name, taken in json.loads(done.stdout.splitlines()[-1]).items():
                    times.setdefault((side, name), []).extend(taken)
        check_agreement(*(np.load(file) for file in files.values()))
    report({key: statistics.median(taken) for key, taken in times.items()}, products)


def report(median: dict[tuple[str, str], float], products: float) -> None:
    """Print the table and the JSON line."""
    print(f"{'':10s}{'ours s':>9s}{'transformers s':>16s}{'speed-up':>10s}{'of the bound':>14s}")
    figures = {}
    for name, passes in (("forward", 1), ("gradient", 3)):
        mine, other = median["ours", name], median["transformers", name]
        share = passes * products / mine
        print(f"{name:10s}{mine:9.2f}{other:16.2f}{other / mine:9.2f}x{share:13.0%}")
        end = "" if name == "gradient" else "_forward"
        figures["speedup_vs_transformers" + end] = round(other / mine, 3)
        figures["fraction_of_matmul_bound" + end] = round(share, 3)
    print(json.dumps({"bench": "model", "figures": figures}))


if __name__ == "__main__":
    main()
