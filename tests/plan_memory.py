"""Run the train step that a plan describes, and print what it planned and what the process grew by.

A process of its own, `python -m tests.plan_memory FOLDER`: resident memory is counted from before
the state exists to the peak inside the step. glibc is told to give every array pages of its own,
so that what is freed is gone.
"""

import ctypes
import gc
import json
import sys

import jax
import numpy as np

from grpo_jax import build, plan
from grpo_jax import config as configs
from grpo_jax.core.batch import Counts
from grpo_jax.models import transformer
from grpo_jax.scale import chips
from grpo_jax.scale import mesh as meshes
from grpo_jax.train import state


def resident(name: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most since the peak was reset."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main(folder: str) -> None:
    config = configs.from_dict(
        {
            "model": {"path": folder},
            "data": {"max_prompt_tokens": 32},
            "sampling": {"max_new_tokens": 32},
            "rollout": {
                "prompts_per_step": 16,
                "completions_per_prompt": 8,
                "micro_batch_size": 64,
                "length_multiple": 64,
            },
        }
    )
    found = plan.make_plan(config, "cpu:1")
    mesh = meshes.make_mesh(config.mesh, chips.topology("cpu:1").devices)
    model, opt = plan.abstract_model(config, mesh), build.build_optimizer(config)
    places = model.places(model.loaded.params, opt.transform)
    steps = build.policy_steps(config, model, opt, places)
    shapes = plan.abstract_batch(found.rows, found.width, mesh, steps)
    create = jax.jit(
        lambda key: state.init(transformer.init_params(model.loaded.config, key), opt.transform),
        out_shardings=places.state,
    )
    counts = Counts(*(np.float32(1000),) * 3)

    def born():
        batch = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes)
        return create(jax.random.key(0)), jax.device_put(batch, shapes.tokens.sharding)

    def step(now, batch):
        return jax.block_until_ready(steps.train(now, batch, counts))

    step(*born())  # compiled, and every library loaded
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    now, batch = born()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    step(now, batch)
    train = found.programs[0]
    planned = train.arguments + train.results + train.temporaries
    print(json.dumps({"planned": planned, "taken": resident("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1])
