"""What a config becomes: where weights live, and who holds them."""

import jax
import numpy as np
import pytest

from grpo_jax import build
from grpo_jax import config as configs
from grpo_jax.core import logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.models import hf, presets, transformer
from tests.train.test_step import make_batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A student, and a teacher of another width."""
    made = {}
    for seed, (name, width) in enumerate({"student": 32, "teacher": 48}.items()):
        config = presets.preset("tiny", num_layers=1, hidden_size=width, intermediate_size=64)
        made[name] = tmp_path_factory.mktemp("models") / name
        hf.save_model(made[name], config, transformer.init_params(config, jax.random.key(seed)))
    return made


def make_config(folders, **sections) -> configs.Config:
    """A run of eight rows a step, one on each of the test's eight devices."""
    return configs.from_dict(
        {
            "model": {"path": str(folders["student"])},
            "tokenizer": {"path": "bytes"},
            "rollout": {
                "prompts_per_step": 4,
                "completions_per_prompt": 2,
                "micro_batch_size": 1,
                "head_chunk": 8,
            },
        }
        | sections
    )


def test_a_teacher_lives_in_shards_and_scores_without_the_filter(folders):
    """Its own width, the sampler's temperature, no top-k; equal to scoring it on one device."""
    config = make_config(
        folders,
        teacher={"path": str(folders["teacher"])},
        advantage={"estimator": "opd"},
        sampling={"filter": {"top_k": 3, "temperature": 0.7}},
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        rollout=make_config(folders).rollout.__dict__ | {"micro_batch_size": 2},
    )
    teacher = build.load_teacher(config, build.load_model(config))
    query = teacher.params["layers"]["mlp"]["up"]["weight"]  # [L, F, D]
    assert query.shape == (1, 64, 48) and query.addressable_shards[0].data.shape == (1, 32, 24)
    batch = make_batch(rows=8, vocabulary=260)
    alone = hf.load_model(folders["teacher"])
    expected = logprobs.token_scores(
        alone.policy,
        alone.params,
        *(batch.tokens, batch.positions, batch.segment_ids),
        filter=FilterConfig(temperature=0.7),
        mask=batch.token_mask,
    ).logprobs
    scored = np.asarray(teacher.score(teacher.params, batch))
    np.testing.assert_allclose(scored, expected, atol=1e-5)  # float32, sums in another order
    assert np.all(np.isfinite(scored)) and np.all(scored[np.asarray(batch.token_mask)] < 0)


def test_without_distillation_no_teacher_is_loaded(folders):
    config = make_config(folders)
    assert build.load_teacher(config, build.load_model(config)) is None
