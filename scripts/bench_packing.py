"""Time the update of packed against padded rows on batches of very unequal lengths.

    python scripts/bench_packing.py [--sequences 128] [--rounds 3] [--width 128] [--layers 2]
        [--seeds 0 1 …] [--no-padded]

Lengths are log-normal with a median of 200 tokens, at most 2,048; `sigma` says how unequal they
are. Both layouts run value, gradient and every metric of the same loss on the same sequences in
micro-batches of one row of 2,048 tokens, and must agree. Packed times are medians of `rounds` runs;
the padded side, a row for each sequence, takes minutes and runs once, at the middle `sigma`. Times
are CPU time of the process; pin it to one core. Fill, which costs nothing to compute, is also shown
for other numbers of sequences over several seeds. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from grpo_jax.core.batch import Batch  # noqa: E402
from grpo_jax.core.filtering import FilterConfig  # noqa: E402
from grpo_jax.core.losses import LossConfig  # noqa: E402
from grpo_jax.data import packing, trajectories  # noqa: E402
from grpo_jax.data.packing import PackingConfig  # noqa: E402
from grpo_jax.models import presets, transformer  # noqa: E402
from grpo_jax.train import layout as layouts  # noqa: E402
from grpo_jax.train import step  # noqa: E402
from grpo_jax.train.layout import Layout  # noqa: E402

ROW = 2048
LAYOUTS = {
    "packed": Layout(PackingConfig(enabled=True, row_length=ROW), micro_rows=1),
    "padded": Layout(micro_rows=1),
}


def draw_lengths(rng: np.random.Generator, sequences: int, sigma: float) -> np.ndarray:
    """Log-normal lengths, tokens."""
    return np.clip(np.exp(rng.normal(np.log(200), sigma, sequences)), 8, ROW).astype(int)


def show_fill(sigmas: list[float], seeds: list[int]) -> None:
    """Print the least and the mean fill of packed rows, by number of sequences."""
    print("fill over seeds, least and mean:")
    for sequences in (32, 64, 96, 128, 256, 512, 1024):
        cells = []
        for sigma in sigmas:
            fills = []
            for seed in seeds:
                lengths = draw_lengths(np.random.default_rng(seed), sequences, sigma)
                bins = packing.pack(lengths.tolist(), ROW)
                fills.append(lengths.sum() / (len(bins) * ROW))
            cells.append(f"{sigma:.1f}: {min(fills):.3f} {statistics.mean(fills):.3f}")
        print(f"  {sequences:5d}  " + "   ".join(cells), flush=True)


def make_batch(sequences: int, sigma: float) -> Batch:
    """Sequences of log-normal length, a quarter of each its prompt."""
    rng = np.random.default_rng(0)
    lengths = draw_lengths(rng, sequences, sigma)
    prompts = lengths // 4
    logprobs = -rng.uniform(1, 4, (sequences, ROW))
    batch = trajectories.collate(
        rng.integers(0, 256, (sequences, ROW)),
        prompts,
        lengths - prompts,
        logprobs,
        advantages=rng.normal(size=sequences),
        length=ROW,
    )
    return batch.replace(
        prev_logprobs=batch.generation_logprobs, reference_logprobs=batch.generation_logprobs
    )


def main() -> None:
    """Print a table and the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5, 0.9, 1.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(20)))
    parser.add_argument("--no-padded", dest="padded", action="store_false")
    options = parser.parse_args()
    show_fill(options.sigmas, options.seeds)
    config = presets.preset(
        "tiny",
        num_layers=options.layers,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
    )
    params = transformer.init_params(config, jax.random.key(0))
    policy = transformer.policy_for(config)
    steps = {
        name: step.make_gradient_step(
            policy,
            LossConfig(),
            FilterConfig(),
            micro_batches=layout.micro_batches,
            chunk_size="auto",
            max_segments=layout.max_segments,
        )
        for name, layout in LAYOUTS.items()
    }
    found, ratio = [], 0.0
    print(f"{'sigma':>5} {'tokens':>7} {'rows':>4} {'fill':>6} {'packed s':>9} {'us/token':>9}")
    for place, sigma in enumerate(options.sigmas):
        batch = make_batch(options.sequences, sigma)
        laid = LAYOUTS["packed"].lay_out(batch)
        losses, seconds = run(steps["packed"], params, batch, laid, options.rounds)
        real, packed = int(laid.shard_tokens.sum()), statistics.median(seconds)
        found.append((layouts.report([laid])["packing/fill"], packed / real))
        print(
            f"{sigma:5.1f} {real:7d} {laid.used_rows:4d} {found[-1][0]:6.3f} {packed:9.3f} "
            f"{1e6 * packed / real:9.2f}",
            flush=True,
        )
        if options.padded and place == len(options.sigmas) // 2:
            wide = LAYOUTS["padded"].lay_out(batch)
            others, (padded,) = run(steps["padded"], params, batch, wide, 1)
            ratio = padded / packed
            print(
                f"      padded: {wide.used_rows} rows, {padded:.3f} s, {ratio:.2f} times",
                flush=True,
            )
            np.testing.assert_allclose(losses[0], others[0], rtol=1e-4, atol=1e-6)
    fills, per_token = (list(column) for column in zip(*found, strict=True))
    mean = statistics.mean(per_token)
    figures = {
        "fill_min": round(min(fills), 4),
        "time_per_token_spread": round(max(abs(x / mean - 1) for x in per_token), 4),
    }
    if options.padded:
        figures["padded_over_packed"] = round(ratio, 2)
    print(json.dumps({"bench": "packing", "figures": figures}))


def run(program, params, batch: Batch, laid, rounds: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of some evaluations, compilation apart."""
    arguments = (params, laid.batch, trajectories.count(batch))
    compiled = program.lower(*arguments).compile()
    losses, seconds = [], []
    for _ in range(rounds):
        mark = time.process_time()
        losses.append(float(jax.block_until_ready(compiled(*arguments))[0]))
        seconds.append(time.process_time() - mark)
    return losses, seconds


if __name__ == "__main__":
    main()
