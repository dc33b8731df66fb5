"""Time the model (forward alone, and with its gradient) against transformers and against products.

    python scripts/bench_model.py [--model models/SmolLM2-135M-Instruct] [--rows 8] [--length 512]
                                  [--rounds 2] [--remat dots_with_no_batch_dims_saveable]

Both sides take the mean negative log-likelihood of the next token over the same random rows of the
same float32 weights, on one pinned core with one thread, and take turns; the losses and the
gradient of the embedding must agree. Ours scores the head in chunks (`token_scores`) as training
does; transformers is given its fastest attention (sdpa). A time is the CPU time of the process, a
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
import time

CORE = sorted(os.sched_getaffinity(0))[-1]
os.sched_setaffinity(0, {CORE})
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from grpo_jax.core.filtering import FilterConfig  # noqa: E402
from grpo_jax.core.logprobs import token_scores  # noqa: E402
from grpo_jax.models import hf  # noqa: E402

torch.set_num_threads(1)


def ours(args, tokens: np.ndarray) -> dict:
    """Return name -> function: the loss, and the loss with all gradients."""
    model = hf.load_model(args.model, dtype="float32", remat=args.remat)
    rows = jnp.asarray(tokens)
    places = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
    segments = jnp.ones_like(rows)

    def loss(params):
        scores = token_scores(
            model.policy, params, rows, places, segments,
            filter=FilterConfig(), chunk_size=args.head_chunk,
        )  # fmt: skip
        return -jnp.sum(scores.logprobs[:, 1:]) / (rows.size - len(rows))

    both = {}
    for name, function in (("forward", loss), ("gradient", jax.value_and_grad(loss))):
        program = jax.jit(function).lower(model.params).compile()
        mib = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"ours, {name}: the compiler plans {mib:.0f} MiB of temporaries", flush=True)
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


def check_agreement(mine, other) -> None:
    """Loss to 1e-5, gradient of the table to 1e-4 of its largest entry: float32 sums of thousands."""
    (loss, grads), (their_loss, their_grad) = mine, other
    np.testing.assert_allclose(float(loss), their_loss, rtol=1e-5)
    table = np.asarray(grads["embed"]["table"])
    np.testing.assert_allclose(table, their_grad, atol=1e-4 * np.abs(their_grad).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--head-chunk", type=int, default=512)
    parser.add_argument("--remat", default="dots_with_no_batch_dims_saveable")
    args = parser.parse_args()
    if not pathlib.Path(args.model, "config.json").is_file():
        parser.error(f"{args.model} is not there; run scripts/fetch_smollm2.py --out {args.model}")
    config = hf.hf_config.read_config(args.model)
    shape = (args.rows, args.length)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, shape).astype(np.int32)
    print(f"core {CORE}, one thread, float32, {shape}; jax {jax.__version__}, "
          f"torch {torch.__version__}, transformers {transformers.__version__}")  # fmt: skip
    products, speed = bound(args, config)
    print(f"products alone: forward {products:.2f} s, {speed:.0f} GFLOP/s", flush=True)
    sides = {"ours": ours(args, tokens), "transformers": theirs(args, tokens)}
    times: dict[tuple[str, str], list[float]] = {}
    answers = {}
    for turn in range(args.rounds):
        for side, functions in sides.items():
            for name, function in functions.items():
                start = time.process_time()
                answers[side, name] = function()
                times.setdefault((side, name), []).append(time.process_time() - start)
                print(
                    f"round {turn + 1}: {side}, {name}: {times[side, name][-1]:.2f} s", flush=True
                )
    check_agreement(answers["ours", "gradient"], answers["transformers", "gradient"])
    median = {key: statistics.median(taken) for key, taken in times.items()}
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
