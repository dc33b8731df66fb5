"""Time sampling against transformers' `generate`, and against what memory and products allow.

    python scripts/bench_generate.py [--model models/SmolLM2-135M-Instruct] [--rounds 2]
                                     [--cases float32 bfloat16 skewed details] [--quick]

Both sides complete the same random prompts of 64 tokens with the same weights at temperature 1,
without filters, to the same lengths: no token ends a completion early. They run on one pinned core
with one thread and take turns, each turn a process of its own; a time is CPU time of a whole call
(prompts included, compilation not), a result the median. Both must emit the same greedy tokens.

"skewed" is 128 requests whose lengths are log-normal (median 32, sigma 1, at most 256). Ours gets
them in their order with 32 slots; transformers in batches of 32 in the same order, each as long
as its longest, which is what `generate` offers.

A step is the difference between a call of N tokens and a call of one, divided by N - 1. Its bound
is the larger of bytes (weights, and the cache up to the middle of the completion) over the
bandwidth of a long sum, and of FLOPs over the throughput of the widest product, both measured in
this run.

"details": what eight completions of one prompt cost to begin, against one; and a step with a cache
twice as long, half filled, against one that is just long enough.

The last line is one JSON object: 64 new tokens, float32.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

CORE = sorted(os.sched_getaffinity(0))[-1]
os.sched_setaffinity(0, {CORE})
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from grpo_jax.core.filtering import FilterConfig  # noqa: E402
from grpo_jax.models import hf, hf_config, transformer  # noqa: E402
from grpo_jax.sampling.engine import EngineConfig, NativeEngine  # noqa: E402
from grpo_jax.sampling.generate import SamplingConfig  # noqa: E402
from grpo_jax.sampling.session import Request  # noqa: E402
from grpo_jax.sampling.slots import Programs, Rule, Seats  # noqa: E402

PROMPT, SLOTS = 64, 32
BATCHES, LENGTHS = (1, 8, 32), (64, 256)


def prompts(args, count: int) -> np.ndarray:
    vocabulary = hf_config.read_config(args.model).vocab_size
    return np.random.default_rng(0).integers(3, vocabulary, (count, PROMPT)).astype(np.int32)


def skewed_lengths(args) -> np.ndarray:
    """New tokens of each request."""
    drawn = np.random.default_rng(1).lognormal(np.log(32), 1.0, 8 if args.quick else 128)
    return np.clip(np.rint(drawn), 1, 256).astype(int)


def calls_of(args) -> dict[str, tuple[int, int]]:
    """Name of a measurement -> (batch, new tokens) of what it calls."""
    if args.case == "skewed":
        return {"skewed": (0, 0)}
    lengths = LENGTHS if args.case == "float32" else LENGTHS[:1]
    if args.quick:
        return {"1 1": (1, 1), "1 64": (1, 64)}
    return {f"{b} {n}": (b, n) for b in BATCHES for n in (1, *lengths)}


class Ours:
    """The native engine."""

    def __init__(self, args):
        compute = "bfloat16" if args.case == "bfloat16" else "float32"
        self.model = hf.load_model(args.model, dtype="float32", compute_dtype=compute)
        config = EngineConfig(rows=SLOTS if args.case == "skewed" else None)  # None: the batch
        self.engine = NativeEngine(self.model.decoder, SamplingConfig(), stop_ids=(), config=config)
        self.key = jax.random.key(0)

    def call(self, tokens: np.ndarray, new: int, greedy: bool = False) -> np.ndarray:
        chosen = FilterConfig(temperature=0.0) if greedy else FilterConfig()
        sampling = SamplingConfig(new, filter=chosen)
        out = self.engine.generate(self.model.params, list(tokens), 1, self.key, sampling=sampling)
        return out.tokens[:, PROMPT:]

    def skewed(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        asked = [
            Request(prompt, id=i, max_new_tokens=int(n))
            for i, (prompt, n) in enumerate(zip(tokens, lengths, strict=True))
        ]
        done = list(self.engine.complete(self.model.params, asked, self.key))
        assert sum(len(c.tokens) for c in done) == lengths.sum()

    @property
    def programs(self) -> int:
        return self.engine.programs


class Transformers:
    """transformers' `generate`, with its own cache and its fastest attention."""

    programs = 0

    def __init__(self, args):
        import torch
        import transformers

        torch.set_num_threads(1)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.case, torch.float32), attn_implementation="sdpa"
        )

    def call(self, tokens: np.ndarray, new: int, greedy: bool = False) -> np.ndarray:
        rows = self.torch.tensor(tokens).long()
        sampled = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
        with self.torch.no_grad():
            out = self.model.generate(
                rows, attention_mask=self.torch.ones_like(rows), max_new_tokens=new,
                eos_token_id=None, pad_token_id=0, **sampled,
            )  # fmt: skip
        return out[:, PROMPT:].numpy()

    def skewed(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        for start in range(0, len(tokens), SLOTS):
            part = slice(start, start + SLOTS)
            self.call(tokens[part], int(lengths[part].max()))


def turn(args) -> None:
    """One side, alone in a process: print its times as JSON."""
    side = (Ours if args.side == "ours" else Transformers)(args)
    first = clock(lambda: side.call(prompts(args, 1), 4))
    times: dict[str, float] = {}
    for name, (batch, new) in calls_of(args).items():
        if name == "skewed":
            lengths = skewed_lengths(args)
            call = functools.partial(side.skewed, prompts(args, len(lengths)), lengths)
        else:
            call = functools.partial(side.call, prompts(args, batch), new)
        if args.side == "ours":  # compiles; torch has nothing to compile
            first += clock(call)
        times[name] = clock(call)
        print(
            f"  {args.side}, {args.case} {name}: {times[name]:.2f} s", file=sys.stderr, flush=True
        )
    greedy = side.call(prompts(args, 2), 16, greedy=True).tolist() if args.case == "float32" else []
    print(json.dumps({"times": times, "greedy": greedy, "first": first, "programs": side.programs}))


def details(args) -> None:
    """Group prefill, and a longer cache; prints ratios as JSON."""
    ours = Ours(args)
    one = prompts(args, 1)
    single = SamplingConfig(1)

    def begin(group: int):
        return ours.engine.generate(ours.model.params, list(one), group, ours.key, sampling=single)

    figures = {"group_prefill": ratio(lambda: begin(8), lambda: begin(1), args.rounds * 3)}
    programs = Programs(ours.model.decoder)
    prepared = programs.prepare(ours.model.params)
    read = programs.read(prepared, prompts(args, 8), np.full(8, PROMPT, np.int32))
    slots = np.arange(8, dtype=np.int32)
    seats = Seats(slots, slots, slots, slots * 0, slots * 0, slots * 0 + 10_000)
    rule = Rule()

    def steps(length: int):
        state = programs.empty(ours.key, rows=8, length=length)
        state, _ = programs.seat(state, read, seats, ours.key, rule=rule)
        box = [state]

        def run():
            # Always from the same position: what was written before is written again.
            state = box[0]._replace(position=jnp.full(8, PROMPT, jnp.int32))
            box[0], drawn = programs.burst(state, prepared, np.int32(1), rule=rule, steps=32)
            jax.block_until_ready(drawn)

        return run

    short, long = steps(2 * PROMPT), steps(4 * PROMPT)
    figures["longer_cache"] = ratio(long, short, args.rounds * 3)
    print(json.dumps(figures))


def ratio(first, second, rounds: int) -> float:
    """Median of first / second, in turns, after one call of each."""
    first(), second()
    return statistics.median(clock(first) / clock(second) for _ in range(rounds))


def clock(function) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def machine() -> tuple[float, float]:
    """Bytes a second of a long sum, and FLOPs a second of the widest product."""
    table = jnp.ones((49_152, 2816))  # 554 MB, as many as the weights
    add = jax.jit(jnp.sum)
    jax.block_until_ready(add(table))
    bandwidth = table.nbytes / min(
        clock(lambda: jax.block_until_ready(add(table))) for _ in range(5)
    )
    x, w = jnp.ones((512, 576)), jnp.ones((49_152, 576))
    product = jax.jit(lambda w, x: w @ x.T)
    jax.block_until_ready(product(w, x))
    work = 2 * x.shape[0] * w.size
    taken = min(clock(lambda: jax.block_until_ready(product(w, x))) for _ in range(3))
    return bandwidth, work / taken


def bound(config, batch: int, new: int, size: int, bandwidth: float, speed: float) -> float:
    """Seconds that a step takes at least; `size` is bytes of a number."""
    weights = sum(x.size for x in jax.tree.leaves(transformer.abstract_params(config)))
    cached = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    read = size * (weights + batch * cached * (PROMPT + new / 2))
    return max(read / bandwidth, 2 * weights * batch / speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=["float32", "skewed", "details", "bfloat16"],
                        choices=("float32", "bfloat16", "skewed", "details"))  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8 requests only")
    parser.add_argument("--side", choices=("ours", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--case", default="float32", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not pathlib.Path(args.model, "config.json").is_file():
        parser.error(f"{args.model} is not there; run scripts/fetch_smollm2.py --out {args.model}")
    if args.case == "details":
        return details(args)
    if args.side:
        return turn(args)
    bandwidth, speed = machine()
    print(f"core {CORE}, one thread; {bandwidth / 1e9:.1f} GB/s read, {speed / 1e9:.0f} GFLOP/s; "
          f"jax {jax.__version__}", flush=True)  # fmt: skip
    figures: dict[str, float] = {}
    for case in args.cases:
        if case == "details":
            figures |= run([*sys.argv, "--case", case])
            print(f"\neight completions begin in {figures['group_prefill']:.2f} times what one "
                  "takes; a step with twice the cache, half filled, takes "
                  f"{figures['longer_cache']:.2f} times", flush=True)  # fmt: skip
            continue
        median = compare(args, case)
        figures |= table(args, case, median, bandwidth, speed)
    print(json.dumps({"bench": "generate", "figures": figures}))


def run(command: list[str]) -> dict:
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(args, case: str) -> dict[tuple[str, str], float]:
    """Let both take turns; returns the median seconds of (side, measurement)."""
    times: dict[tuple[str, str], list[float]] = {}
    greedy: dict[str, list] = {}
    print(f"\n{case}", flush=True)
    for number in range(args.rounds):
        for side in ("ours", "transformers"):
            answer = run([*sys.argv, "--case", case, "--side", side])
            greedy[side] = answer["greedy"]
            for name, taken in answer["times"].items():
                times.setdefault((side, name), []).append(taken)
            if side == "ours" and number == 0:
                print(f"ours: {answer['programs']} programs; first calls, with compilation, "
                      f"{answer['first']:.0f} s", flush=True)  # fmt: skip
    assert greedy["ours"] == greedy["transformers"], "greedy tokens differ"
    return {key: statistics.median(taken) for key, taken in times.items()}


def table(args, case: str, median, bandwidth: float, speed: float) -> dict[str, float]:
    """Print what was measured; return the figures."""
    config = hf_config.read_config(args.model)
    figures = {}
    if case == "skewed":
        mine, other = median["ours", "skewed"], median["transformers", "skewed"]
        tokens = int(skewed_lengths(args).sum())
        print(f"{tokens} tokens: ours {mine:.1f} s ({tokens / mine:.0f} a second), transformers "
              f"{other:.1f} s ({tokens / other:.0f}); {other / mine:.2f}x", flush=True)  # fmt: skip
        return {"speedup_skewed": round(other / mine, 3)}
    print("batch  new   ours s  transformers s  speed-up   step ms  theirs   bound  of the bound")
    for side, name in median:
        batch, new = map(int, name.split())
        if side != "ours" or new == 1:
            continue
        mine, other = median["ours", name], median["transformers", name]
        steps = [1e3 * (median[s, name] - median[s, f"{batch} 1"]) / (new - 1)
                 for s in ("ours", "transformers")]  # fmt: skip
        size = 2 if case == "bfloat16" else 4
        least = 1e3 * bound(config, batch, new, size, bandwidth, speed)
        print(f"{batch:5d}{new:5d}{mine:9.2f}{other:16.2f}{other / mine:9.2f}x{steps[0]:10.1f}"
              f"{steps[1]:8.1f}{least:8.1f}{least / steps[0]:14.0%}", flush=True)  # fmt: skip
        if new == 64:
            end = "" if case == "float32" else "_bfloat16"
            figures[f"speedup_batch_{batch}{end}"] = round(other / mine, 3)
            if not end:
                figures[f"fraction_of_bound_batch_{batch}"] = round(least / steps[0], 3)
    return figures


if __name__ == "__main__":
    main()
