"""Time the update of packed against padded rows on batches of very unequal lengths.

    python scripts/bench_packing.py [--sequences 48] [--rounds 3] [--width 256] [--layers 2]

Lengths are log-normal with a median of 200 tokens, at most 2,048; `sigma` says how unequal they
are. Both layouts run value, gradient and every metric of the same loss on the same sequences in
micro-batches of one row, and take turns; a result is the median. The padded side is cut into
rows of 2,048 tokens, as a run that must hold its longest sequence is. The last line is one JSON
object.
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
from grpo_jax.data import trajectories  # noqa: E402
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


def make_batch(sequences: int, sigma: float) -> Batch:
    """Sequences of log-normal length, a quarter of each its prompt."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(200), sigma, sequences)), 8, ROW).astype(int)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5, 0.9, 1.2])
    options = parser.parse_args()
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
            chunk_size=512,
            max_segments=layout.max_segments,
        )
        for name, layout in LAYOUTS.items()
    }
    found, losses = [], []
    print(f"{'sigma':>5} {'tokens':>7} {'fill':>6} {'packed s':>9} {'padded s':>9} {'us/token':>9}")
    for sigma in options.sigmas:
        batch = make_batch(options.sequences, sigma)
        counts = trajectories.count(batch)
        laid = {name: layout.lay_out(batch) for name, layout in LAYOUTS.items()}
        real = int(laid["packed"].shard_tokens.sum())
        seconds = {name: [] for name in LAYOUTS}
        for turn in range(options.rounds + 1):  # the first turn compiles
            for name in LAYOUTS if turn else reversed(LAYOUTS):
                mark = time.process_time()
                loss, *_ = jax.block_until_ready(steps[name](params, laid[name].batch, counts))
                if turn:
                    seconds[name].append(time.process_time() - mark)
                losses.append((sigma, name, float(loss)))
        fill = layouts.report([laid["packed"]])["packing/fill"]
        packed, padded = (statistics.median(seconds[name]) for name in LAYOUTS)
        found.append((fill, packed / real, padded / packed))
        print(
            f"{sigma:5.1f} {real:7d} {fill:6.3f} {packed:9.3f} {padded:9.3f} "
            f"{1e6 * packed / real:9.2f}",
            flush=True,
        )
    for sigma in options.sigmas:
        values = [loss for s, _, loss in losses if s == sigma]
        assert np.ptp(values) <= 1e-5 * max(1e-3, abs(values[0])), (sigma, values)
    fills, per_token, ratios = (list(column) for column in zip(*found, strict=True))
    mean = statistics.mean(per_token)
    figures = {
        "fill_min": round(min(fills), 4),
        "time_per_token_spread": round(max(abs(x / mean - 1) for x in per_token), 4),
        "padded_over_packed_min": round(min(ratios), 2),
        "padded_over_packed_max": round(max(ratios), 2),
    }
    print(json.dumps({"bench": "packing", "figures": figures}))


if __name__ == "__main__":
    main()
