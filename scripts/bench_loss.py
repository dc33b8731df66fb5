"""Time the loss (value, gradient, every metric) against eager torch and against the hardware.

    python scripts/bench_loss.py [--shapes 64x1024,16x8192,256x4096] [--config default|full]
                                 [--rounds 5] [--samples 5] [--torch-compile]

Ours walks the rows in blocks of about 2^13 tokens (`row_block`), which is how a CPU should run it,
in vectors as wide as the processor's (`jax.jit(compiler_options=...)`: by itself the compiler keeps
to 256 bits). Both sides get the same numbers and return the same metrics, those of the reference;
`all` is ours with every metric of its own besides. They run on one pinned core with one thread, and
take turns. A sample is
the CPU time of the process (with one thread on one core that is the wall time of an idle machine,
and other people's processes do not count), a result is the median of all samples. The bound is the
larger of two times measured in the same run: reading every input and writing the gradient once at
the memory bandwidth seen for that many bytes, and `EXPS` transcendentals a token at the
throughput of a loop that does nothing else. The last line is one JSON object.
"""

import argparse
import json
import os
import pathlib
import sys
import time

CORE = sorted(os.sched_getaffinity(0))[-1]
os.sched_setaffinity(0, {CORE})
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from grpo_jax.core import losses  # noqa: E402
from grpo_jax.core.batch import Batch, Counts, TokenScores  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "reference"))
import torch_loss  # noqa: E402

torch.set_num_threads(1)
torch_loss.GUARDS = False  # the plain arithmetic of the reference, which may overflow
BLOCK_TOKENS = 1 << 13
EXPS = 4  # exp of log-ratio, of prev - gen, of ref - current; log of the mixture
CONFIGS = {
    "default": {},
    "full": dict(
        ratio_clip_max=0.28,
        ratio_clip_c=3.0,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=2.0,
    ),
}


def make_arrays(rows: int, width: int) -> dict[str, np.ndarray]:
    """Draw a batch whose log-probabilities differ as they do between a sampler and a trainer."""
    rng = np.random.default_rng(0)
    current = -rng.exponential(1.0, (rows, width)).astype(np.float32)

    def near(scale: float) -> np.ndarray:
        noise = rng.standard_normal((rows, width)).astype(np.float32)
        return np.minimum(current + scale * noise, 0).astype(np.float32)

    columns = np.arange(width)
    lengths = rng.integers(width // 2, width + 1, (rows, 1))
    return dict(
        current=current,
        prev=near(0.05),
        generation=near(0.05),
        reference=near(0.2),
        advantages=np.repeat(rng.standard_normal((rows, 1)).astype(np.float32), width, 1),
        mask=(columns > width // 8) & (columns < lengths),
    )


def compiler_options() -> dict[str, int]:
    """Ask for 512-bit vectors where the processor has them."""
    info = pathlib.Path("/proc/cpuinfo")
    wide = info.exists() and "avx512f" in info.read_text()
    return {"xla_cpu_prefer_vector_width": 512} if wide else {}


def jax_step(a: dict[str, np.ndarray], options: dict, names: set[str] | None):
    """Return (a function of no arguments: loss, metrics and gradient; its compiled memory plan).

    `names`: the metrics to return; None for all.
    """
    rows, width = a["mask"].shape
    config = losses.LossConfig(**options)
    batch = Batch(
        tokens=jnp.zeros((rows, width), jnp.int32),
        segment_ids=jnp.ones((rows, width), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width)),
        token_mask=jnp.asarray(a["mask"]),
        sample_weights=jnp.ones((rows, width), jnp.float32),
        advantages=jnp.asarray(a["advantages"]),
        generation_logprobs=jnp.asarray(a["generation"]),
        prev_logprobs=jnp.asarray(a["prev"]),
        reference_logprobs=jnp.asarray(a["reference"]),
    )
    counts = Counts(jnp.float32(a["mask"].sum()), jnp.float32(rows))
    block = max(BLOCK_TOKENS // width, 2)  # with one row the compiler copies its inputs

    def loss(logprobs, batch, counts):
        scores = TokenScores(logprobs)
        value, metrics = losses.clipped_pg_loss(scores, batch, counts, config, row_block=block)
        if names is not None:
            metrics = {name: metrics[name] for name in names}
        return value, metrics

    current = jnp.asarray(a["current"])
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=compiler_options())
    step = step.lower(current, batch, counts).compile()
    memory = step.memory_analysis()
    return lambda: jax.block_until_ready(step(current, batch, counts)), memory


def torch_step(a: dict[str, np.ndarray], options: dict, compiled: bool):
    """Return a function of no arguments: forward, backward and metrics of the mirror."""
    rows, _ = a["mask"].shape
    data = dict(
        next_token_logprobs=a["current"][:, 1:].copy(),
        prev_logprobs=a["prev"],
        generation_logprobs=a["generation"],
        reference_policy_logprobs=a["reference"],
        advantages=a["advantages"],
        token_mask=a["mask"].astype(np.float32),
        sample_mask=np.ones(rows, np.float32),
        global_valid_seqs=np.float32(rows),
        global_valid_toks=np.float32(a["mask"].sum()),
    )
    tensors = {k: torch.as_tensor(v) for k, v in data.items()}
    leaf = tensors["next_token_logprobs"].requires_grad_()
    function = torch_loss.clipped_pg_loss
    if compiled:
        function = torch.compile(function, dynamic=False)

    def step():
        leaf.grad = None
        loss, metrics = function(tensors, options)
        loss.backward()
        return loss.detach(), leaf.grad, metrics

    return step


def torch_peak_bytes(step) -> int:
    """The most that torch's allocator held at once above what it held before."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profiler:
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    changes = [e.nbytes() for e in events if e.name() == "[memory]"]
    return int(np.cumsum(changes).max(initial=0))


def check_agreement(ours, theirs) -> None:
    """Both sides must have computed the same thing, or the times mean nothing."""
    (loss, metrics), grad = ours()
    other_loss, other_grad, other_metrics = theirs()
    assert metrics.keys() == other_metrics.keys(), metrics.keys() ^ other_metrics.keys()
    np.testing.assert_allclose(float(loss), float(other_loss), rtol=2e-5, atol=1e-6)
    floor = 1e-6 * float(jnp.abs(grad).max())
    np.testing.assert_allclose(np.asarray(grad)[:, 1:], other_grad.numpy(), rtol=1e-4, atol=floor)
    # the values of the metrics are compared case by case in the tests


def sample(function, seconds: float = 0.02) -> float:
    """CPU milliseconds of one call, averaged over enough calls to fill `seconds`."""
    calls, start = 0, time.process_time()
    while True:
        function()
        calls += 1
        spent = time.process_time() - start
        if spent > seconds:
            return 1e3 * spent / calls


def alternate(functions: dict, rounds: int, samples: int) -> dict[str, float]:
    """The median of `rounds * samples` samples of each function, taking turns."""
    times = {name: [] for name in functions}
    for function in functions.values():
        function(), function()
    for _ in range(rounds):
        for name, function in functions.items():
            times[name] += [sample(function) for _ in range(samples)]
    return {name: float(np.median(t)) for name, t in times.items()}


def bound_probes(nbytes: int) -> dict:
    """Functions whose times give the bandwidth for `nbytes` and the cost of 2^20 exponentials."""
    words = jnp.asarray(np.ones(nbytes // 8, np.float32))
    copy = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    holder = [words]

    def stream():
        holder[0] = jax.block_until_ready(copy(holder[0]))

    block = jnp.linspace(-1.0, 1.0, 16384)
    exps = jax.jit(
        lambda x: jax.lax.fori_loop(0, 64, lambda _, y: jnp.exp(0.5 * y), x),
        compiler_options=compiler_options(),
    )
    return {"stream": stream, "exps": lambda: jax.block_until_ready(exps(block))}


def run_shape(rows: int, width: int, options: dict, args) -> dict[str, float]:
    """Measure one shape and print its row."""
    arrays = make_arrays(rows, width)
    theirs = torch_step(arrays, options, compiled=False)
    ours, memory = jax_step(arrays, options, set(theirs()[2]))
    full, full_memory = jax_step(arrays, options, None)
    check_agreement(ours, theirs)
    # five float arrays and the mask are read, the gradient is written
    nbytes = rows * width * (6 * 4 + 1 + 4)
    functions = {"ours": ours, "all": full, "eager": theirs, **bound_probes(nbytes)}
    if args.torch_compile:
        functions["compiled"] = torch_step(arrays, options, compiled=True)
    ms = alternate(functions, args.rounds, args.samples)
    exps_ms = ms["exps"] * rows * width * EXPS / 2**20
    bound = max(ms["stream"], exps_ms)
    temp = max(memory.temp_size_in_bytes, full_memory.temp_size_in_bytes) / 2**20
    torch_peak = torch_peak_bytes(theirs) / 2**20
    result = dict(
        ms=ms["ours"],
        eager_ms=ms["eager"],
        speedup=ms["eager"] / ms["ours"],
        speedup_all=ms["eager"] / ms["all"],
        over_bound=ms["ours"] / bound,
        eager_over_bound=ms["eager"] / bound,
        temp_mib=temp,
        torch_peak_mib=torch_peak,
        memory_ratio=torch_peak / (temp + rows * width * 4 / 2**20),
    )
    if args.torch_compile:
        result["speedup_vs_compiled"] = ms["compiled"] / ms["ours"]
    print(
        f"{rows}x{width}: ours {ms['ours']:.2f} ms, torch eager {ms['eager']:.2f} ms"
        f" ({result['speedup']:.1f}x; with all our metrics {ms['all']:.2f} ms,"
        f" {result['speedup_all']:.1f}x), bound {bound:.2f} ms (stream {ms['stream']:.2f},"
        f" {EXPS} exps {exps_ms:.2f}), ours {result['over_bound']:.1f}x over it;"
        f" temporaries {temp:.2f} MiB, torch peak {torch_peak:.1f} MiB"
        f" ({result['memory_ratio']:.1f}x ours with its gradient)"
        + (f"; torch.compile {ms['compiled']:.2f} ms" if args.torch_compile else ""),
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shapes", default="64x1024,16x8192,256x4096")
    parser.add_argument("--config", choices=sorted(CONFIGS), default="default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--torch-compile", action="store_true")
    args = parser.parse_args()
    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    print(f"core {CORE}, one thread; {versions}; configuration {args.config}")
    figures: dict[str, float] = {}
    for shape in args.shapes.split(","):
        rows, width = map(int, shape.split("x"))
        result = run_shape(rows, width, CONFIGS[args.config], args)
        figures[f"speedup_vs_torch_eager_{shape}"] = round(result["speedup"], 2)
        figures[f"speedup_vs_torch_eager_{shape}_all_our_metrics"] = round(result["speedup_all"], 2)
        figures[f"time_over_bound_{shape}"] = round(result["over_bound"], 2)
        figures[f"temp_mib_{shape}"] = round(result["temp_mib"], 3)
        figures[f"memory_ratio_vs_torch_eager_{shape}"] = round(result["memory_ratio"], 2)
        if "speedup_vs_compiled" in result:
            figures[f"speedup_vs_torch_compile_{shape}"] = round(result["speedup_vs_compiled"], 2)
    print(json.dumps({"bench": "loss", "figures": figures}))


if __name__ == "__main__":
    main()
