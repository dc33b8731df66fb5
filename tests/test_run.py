"""The commands themselves: what a run holds in memory once it has begun."""

import gc

import jax
import pytest

from grpo_jax import config as configs
from grpo_jax import run
from grpo_jax.models import hf, presets, transformer
from grpo_jax.train import loop

WIDTH = 24  # no other test has weights of this shape


class _BegunError(Exception):
    """Ends a run where its first step would begin."""


@pytest.mark.parametrize(
    ("estimator", "beta", "copies"), [("grpo", 0.0, 3), ("grpo", 0.01, 4), ("gae", 0.0, 6)]
)
def test_a_run_holds_weights_moments_and_a_reference_only_if_read(
    tmp_path, monkeypatch, estimator, beta, copies
):
    """Parameters and two moments, for policy and critic each; one more set for the KL.

    What was loaded is not kept besides.
    """
    shape = presets.preset("tiny", num_layers=1, hidden_size=WIDTH, intermediate_size=16)
    hf.save_model(tmp_path / "model", shape, transformer.init_params(shape, jax.random.key(0)))
    config = configs.from_dict(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"path": str(tmp_path / "model")},
            "tokenizer": {"path": "bytes"},
            "data": {"size": 64, "eval_size": 4, "max_prompt_tokens": 300},
            "rollout": {"micro_batch_size": 1},
            "sampling": {"max_new_tokens": 8},
            "reward": {"workers": 0},
            "advantage": {"estimator": estimator},
            "loss_fn": {"reference_policy_kl_penalty": beta},
            "report": {"picture_every": 0},
        }
    )
    found = []

    def begin(*arguments):
        del arguments
        gc.collect()
        found.extend(x for x in jax.live_arrays() if x.shape == (shape.vocab_size, WIDTH))
        raise _BegunError

    monkeypatch.setattr(loop, "train", begin)
    with pytest.raises(_BegunError):
        run.train(config)
    assert len(found) == copies
    assert all(len(x.sharding.device_set) == 8 for x in found)
