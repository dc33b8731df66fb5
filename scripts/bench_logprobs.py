"""Time and peak memory of the log-probability head: full logits, checkpointed chunks, and ours.

    python scripts/bench_logprobs.py [--size small|large|both] [--repeats 1] [--methods a,b,...]
    python scripts/bench_logprobs.py --tpu      # the TPU compiler's own figures; needs jax[tpu]

Value and gradient with respect to hidden states and head, float32, one pinned core, one thread.
The methods take turns; every call is a process of its own, so that its peak memory is its own, and
starts with compiled code and no other warm-up. Seconds are CPU time of the one timed call. Memory
is what the process held at its peak beyond what it held before the call (inputs), and what the
compiler planned beside inputs and results. The bound is the time of the four products with the
head that a method with recomputation has to do, measured in the same round.

    full        jax, log-softmax of all logits, automatic gradient
    torch       the same in torch
    checkpoint  jax, chunks under jax.checkpoint
    ours        grpo_jax.core.logprobs in chunks
    top_p       ours with top-p 0.95, on logits so flat that every row needs the search
    top_k_p     ours with top-k 50 and top-p 0.95
    single      the single pass of core/single_pass.py, with the whole GRPO loss
    products    logits twice, gradient of hidden states, gradient of the head

The large size takes about one minute a call, so each method runs once unless `--repeats` asks for
medians of more; single calls of one method differ by some 5 %. The last line is one JSON object:
its figures compare with full logits in jax or in torch, whichever was faster in this run.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

SIZES = {"small": (2048, 576, 49_152), "large": (4096, 1024, 151_936)}
METHODS = "torch full ours products top_p single top_k_p checkpoint".split()
CHUNK, CHECKPOINT_CHUNK = 96, 256


def child(method: str, n: int, d: int, v: int) -> dict:
    """Run one method once in this process."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import numpy as np

    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((n, d), dtype=np.float32)
    head = rng.standard_normal((v, d), dtype=np.float32)
    head *= np.float32(2.5 / np.sqrt(d))  # logits of standard deviation 2.5
    targets = rng.integers(0, v, n).astype(np.int32)
    hidden += 2 * head[targets]  # likely enough to pass the filters, and far from certain
    call, temporaries = (torch_call if method == "torch" else jax_call)(
        method, hidden, head, targets
    )
    del hidden, head
    before, start = resident(), time.process_time()
    value, norm = call()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return dict(seconds=seconds, peak=peak, temporaries=temporaries, value=value, norm=norm)


def resident() -> int:
    """Bytes of memory this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def torch_call(method, hidden, head, targets):
    """Full logits in torch."""
    del method
    import torch

    torch.set_num_threads(1)
    h, w = (torch.as_tensor(x.copy()).requires_grad_() for x in (hidden, head))
    y = torch.as_tensor(targets).long()[:, None]

    def call():
        value = torch.log_softmax(h @ w.T, dim=-1).gather(1, y).sum()
        value.backward()
        return value.item(), float(h.grad.double().norm())

    return call, None


def jax_call(method, hidden, head, targets):
    """Compile one of the methods in jax; the call returns the loss and the norm of d hidden."""
    import jax
    import jax.numpy as jnp

    params = jax.device_put({"hidden": hidden[None], "head": head})
    tokens = jnp.asarray(targets)[None]
    if method == "products":
        return products(params), None
    step = jax.jit(jax.value_and_grad(losses()[method])).lower(params, tokens).compile()

    def call():
        value, grads = jax.block_until_ready(step(params, tokens))
        return float(value), float(jnp.linalg.norm(grads["hidden"]))

    return call, step.memory_analysis().temp_size_in_bytes


def losses(chunk: int = CHUNK) -> dict:
    """Each method as (params, tokens [1, N]) -> sum of log-probabilities; row n scores token n."""
    import jax
    import jax.numpy as jnp

    from grpo_jax.core import logprobs, single_pass
    from grpo_jax.core.batch import Batch, Counts
    from grpo_jax.core.filtering import FilterConfig
    from grpo_jax.core.loss_config import LossConfig
    from grpo_jax.core.policy import Policy
    from grpo_jax.models.transformer import unembed

    def hidden(params, tokens, positions, segments):
        return jnp.pad(params["hidden"], ((0, 0), (0, 1), (0, 0)))

    policy = Policy(hidden, lambda params: params["head"], unembed, row_wise_head=True)

    def log_p(h, w, y):
        log_p = jax.nn.log_softmax(jnp.einsum("td,vd->tv", h, w))
        return jnp.sum(jnp.take_along_axis(log_p, y[:, None], axis=-1))

    def full(params, tokens):
        return log_p(params["hidden"][0], params["head"], tokens[0])

    def checkpoint(params, tokens):
        h = params["hidden"].reshape(-1, CHECKPOINT_CHUNK, params["hidden"].shape[-1])
        y = tokens.reshape(-1, CHECKPOINT_CHUNK)
        one = jax.checkpoint(lambda w, h, y: log_p(h, w, y), prevent_cse=False)
        return jnp.sum(jax.lax.map(lambda part: one(params["head"], *part), (h, y)))

    def shifted(tokens):
        tokens = jnp.pad(tokens, ((0, 0), (1, 0)))
        return tokens, jnp.arange(tokens.size)[None], jnp.ones_like(tokens)

    def ours(filter):
        def loss(params, tokens):
            scores = logprobs.token_scores(
                policy, params, *shifted(tokens), filter=filter, chunk_size=chunk
            )
            return jnp.sum(jnp.where(scores.logprobs > -jnp.inf, scores.logprobs, 0.0))

        return loss

    def single(params, tokens):
        tokens, positions, segments = shifted(tokens)
        ones = jnp.ones(tokens.shape, jnp.float32)
        batch = Batch(
            tokens, segments, positions, token_mask=ones > 0, sample_weights=ones,
            advantages=ones, generation_logprobs=-ones, prev_logprobs=-ones,
        )  # fmt: skip
        counts, config = (
            Counts(jnp.sum(ones), jnp.float32(1)),
            LossConfig(reference_policy_kl_penalty=0.0),
        )
        return single_pass.policy_loss(
            policy, params, batch, counts, config, filter=FilterConfig(), chunk_size=chunk
        )[0]

    return dict(
        full=full,
        checkpoint=checkpoint,
        single=single,
        ours=ours(FilterConfig()),
        top_p=ours(FilterConfig(top_p=0.95)),
        top_k_p=ours(FilterConfig(top_k=50, top_p=0.95)),
    )


def products(params):
    """The four products with the head, 256 tokens at a time, as one call."""
    import jax
    import jax.numpy as jnp

    chunk = 256
    h, w = params["hidden"][0, :chunk], params["head"]
    logits = jnp.ones((chunk, w.shape[0]), jnp.float32)
    forms = [
        (jax.jit(lambda h, w: jnp.einsum("td,vd->tv", h, w)).lower(h, w).compile(), (h, w)),
        (jax.jit(lambda z, w: z @ w).lower(logits, w).compile(), (logits, w)),
        (jax.jit(lambda z, h: z.T @ h).lower(logits, h).compile(), (logits, h)),
    ]
    for form, arguments in forms:
        jax.block_until_ready(form(*arguments))

    def call():
        for _ in range(params["hidden"].shape[1] // chunk):
            for form, arguments in (forms[0], *forms):
                jax.block_until_ready(form(*arguments))
        return 0.0, 0.0

    return call


def run_size(size: str, methods: list[str], repeats: int) -> dict[str, float]:
    """Take turns, print a row for each method, and return the figures."""
    n, d, v = SIZES[size]
    results: dict[str, list[dict]] = {method: [] for method in methods}
    for turn in range(repeats):
        for method in methods:
            command = [sys.executable, __file__, "--child", method, "--shape", f"{n},{d},{v}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{method} failed:\n{done.stderr[-2000:]}", flush=True)
                continue
            results[method].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"  {turn + 1}/{repeats} {method} {results[method][-1]}", flush=True)
    print(f"(N, D, V) = ({n}, {d}, {v}); full float32 logits {n * v * 4 / 2**20:.0f} MiB")
    rows = {name: middle(found) for name, found in results.items() if found}
    for name, row in rows.items():
        planned = row["temporaries"]
        over = {k: row["seconds"] / rows[k]["seconds"] for k in ("full", "products") if k in rows}
        print(
            f"  {name:10s} {row['seconds']:8.2f} s  peak {row['peak'] / 2**20:6.0f} MiB  planned "
            + ("     -" if planned is None else f"{planned / 2**20:6.0f}")
            + "".join(f"  {ratio:.2f} × {k}" for k, ratio in over.items()),
            flush=True,
        )
    check_agreement(rows)
    return figures(rows, 4 * n * v)


def middle(found: list[dict]) -> dict:
    """The run with the median time."""
    return sorted(found, key=lambda row: row["seconds"])[(len(found) - 1) // 2]


def check_agreement(rows: dict[str, dict]) -> None:
    """All unfiltered sums of log-probabilities must be the same, or the times mean nothing."""
    same = [rows[k] for k in ("full", "torch", "checkpoint", "ours") if k in rows]
    for row in same[1:]:
        for key in ("value", "norm"):
            assert abs(row[key] - same[0][key]) <= 1e-4 * abs(same[0][key]), (key, rows)


def figures(rows: dict[str, dict], full_bytes: int) -> dict[str, float]:
    """What the last line holds, of the methods that were run."""
    seconds = {name: row["seconds"] for name, row in rows.items()}
    found = {}
    if "ours" in rows:
        found["peak_memory_fraction_of_full_logits"] = rows["ours"]["temporaries"] / full_bytes
    seconds["fastest"] = min(
        (seconds[k] for k in ("full", "torch") if k in seconds), default=float("nan")
    )
    for name, over, under in (
        ("time_over_full_logits", "ours", "fastest"),
        ("time_over_jax_full_logits", "ours", "full"),
        ("time_over_torch_full_logits", "ours", "torch"),
        ("time_over_matmul_bound", "ours", "products"),
        ("single_pass_time_over_full_logits", "single", "fastest"),
        ("single_pass_time_over_jax_full_logits", "single", "full"),
        ("single_pass_time_over_torch_full_logits", "single", "torch"),
    ):
        if over in seconds and under in seconds:
            found[name] = seconds[over] / seconds[under]
    if "ours" in seconds and "top_p" in seconds:
        found["filter_overhead"] = seconds["top_p"] / seconds["ours"] - 1
    return {name: round(value, 4) for name, value in found.items()}


def tpu_figures() -> None:
    """Compile the head of an 8B model for one v5e chip: 8 × 8,192 tokens, bfloat16, D = 4096."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    n, d, v = 8 * 8192, 4096, 151_936
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    place = jax.sharding.SingleDeviceSharding(devices[0])
    shape = lambda size, dtype: jax.ShapeDtypeStruct(size, dtype, sharding=place)  # noqa: E731
    params = {"hidden": shape((1, n, d), jnp.bfloat16), "head": shape((v, d), jnp.bfloat16)}
    for name, loss in losses(chunk=256).items():
        step = jax.jit(jax.value_and_grad(loss))
        try:
            compiled = step.lower(params, shape((1, n), jnp.int32)).compile()
        except jax.errors.JaxRuntimeError as error:
            print(f"{name:10s} does not compile: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        cost = compiled.cost_analysis()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        print(
            f"{name:10s} temporaries {temporaries / 2**30:6.2f} GiB ="
            f" {100 * temporaries / (4 * n * v):5.1f} % of float32 logits; the compiler counts"
            f" {cost['flops']:.3g} operations and {cost['bytes accessed']:.3g} bytes"
            " (the body of a loop once)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES, "both"], default="small")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tpu", action="store_true")
    parser.add_argument("--child", choices=METHODS)
    parser.add_argument("--shape")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, *map(int, args.shape.split(",")))))
        return
    if args.tpu:
        tpu_figures()
        return
    found = {}
    for size in SIZES if args.size == "both" else [args.size]:
        found = run_size(size, args.methods.split(","), args.repeats)
    print(json.dumps({"bench": "logprobs", "figures": found}))


if __name__ == "__main__":
    main()
