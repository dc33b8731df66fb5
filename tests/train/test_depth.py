"""The program of a train step does not grow with the number of layers, whatever kinds they are."""

import jax
import pytest

from grpo_jax.core import masks
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.models import lora, presets, transformer
from grpo_jax.train import optimizer, state, step
from grpo_jax.train.optimizer import OptimizerConfig
from tests.train.test_step import make_batch

CASES = {
    "llama": {},
    "qwen3, blocks recomputed": {"qk_norm": True, "family": "qwen3", "remat": "full"},
    "gemma": {
        "pattern": ("local", "local", "global"),
        "window": 4,
        "sandwich_norms": True,
        "attention_soft_cap": 2.0,
    },
    "experts": {"num_experts": 4, "experts_per_token": 2, "expert_size": 24},
    "adapter": {},
}


def size(name: str, depth: int) -> int:
    """Operations of the step's program, as it goes to the compiler."""
    config = presets.preset("tiny", num_layers=depth, **CASES[name])
    policy, shapes = transformer.policy_for(config), transformer.abstract_params(config)
    opt = optimizer.build_optimizer(OptimizerConfig(lr=0.01), 10)
    trained = shapes
    if name == "adapter":
        chosen = lora.LoraConfig(rank=2)
        trained = jax.eval_shape(lambda p: lora.init_adapter(p, chosen, jax.random.key(0)), shapes)
        policy = lora.graft(policy, shapes, chosen.scale)
    made = state.abstract(trained, opt.transform)
    train = step.make_train_step(
        policy, opt, LossConfig(), FilterConfig(), micro_batches=2, chunk_size=8
    )
    batch = make_batch(rows=4, width=16, vocabulary=264)
    return train.lower(made, batch, masks.count(batch)).as_text().count("\n")


@pytest.mark.parametrize("name", CASES)
def test_thirty_layers_are_the_program_of_six(name):
    """docs/log.md has the seconds that the compiler takes; this is what it is given."""
    assert 500 < size(name, 30) <= 1.02 * size(name, 6)
