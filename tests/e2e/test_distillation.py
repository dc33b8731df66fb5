"""Distillation through the whole command: a small student, a sharper and larger teacher."""

import json

import jax
import numpy as np
import pytest

from grpo_jax.core import logprobs
from grpo_jax.core.batch import Batch
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.data.tokenizer import ByteTokenizer
from grpo_jax.models import hf, presets, transformer
from grpo_jax.train import dump
from tests.e2e.conftest import changed, finish, start


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A model of another size than the student, with opinions of its own."""
    config = presets.preset("tiny", num_layers=2, hidden_size=48, initializer_range=0.25)
    params = transformer.init_params(config, jax.random.key(7))
    params["embed"]["table"] += 1.0  # a common part: the same letters are likely everywhere
    folder = tmp_path_factory.mktemp("models") / "teacher"
    hf.save_model(folder, config, params)
    return folder


def log_probabilities(model: hf.LoadedModel, batch: Batch) -> np.ndarray:
    """Log-probability of each token of a batch among those of the tokenizer, unfiltered, nats."""
    arrays = (batch.tokens, batch.positions, batch.segment_ids)
    known = FilterConfig(vocabulary=ByteTokenizer.vocab_size)
    scores = logprobs.token_scores(model.policy, model.params, *arrays, filter=known)
    return np.asarray(scores.logprobs, np.float64)


def exact_kl(student: hf.LoadedModel, teacher: hf.LoadedModel, batch: Batch) -> float:
    """Mean over the trained tokens' contexts of KL(student ‖ teacher), summed over all tokens."""
    arrays = (batch.tokens, batch.positions, batch.segment_ids)

    def log_softmax(model):
        hidden = model.policy.hidden(model.params, *arrays)[:, :-1]
        logits = model.policy.unembed(model.policy.head(model.params), hidden)
        known = logits[..., : ByteTokenizer.vocab_size]  # a run knows no others
        return np.asarray(jax.nn.log_softmax(known), np.float64)

    ls, lt = log_softmax(student), log_softmax(teacher)
    return float((np.exp(ls) * (ls - lt)).sum(-1)[np.asarray(batch.token_mask)[:, 1:]].mean())


def test_a_student_comes_closer_to_its_teacher(base_config, teacher_folder, tiny_folder, tmp_path):
    """The KL falls, on its own texts and exactly; and the advantages are the gap of the models.

    In packed rows, so that the teacher reads them too.
    """
    folder = tmp_path / "run"
    config = changed(
        base_config,
        run={"steps": 14, "dir": str(folder), "dump_steps": [1]},
        teacher={"path": str(teacher_folder)},
        rollout={
            "updates_per_rollout": 1,
            "completions_per_prompt": 16,
            "micro_batch_size": None,
            "head_chunk": 64,
        },
        packing={"enabled": True, "row_length": 512, "max_sequences": 8},
        advantage={"estimator": "opd", "subtract_global_baseline": True},
        loss_fn={"reference_policy_kl_penalty": 0.0, "disable_ppo_ratio": True},
        optimizer={"lr": 0.01, "schedule": "constant", "weight_decay": 0.0},
        evaluate={"at_start": False, "at_end": False},
        checkpoint={"every": 0},
    )
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    status, output = finish(start("train", path))
    assert status == 0, output
    assert "warning" not in output
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["on_policy_distillation/teacher_student_logprob_gap_mean"] for row in rows]
    assert rows[0]["packing/rows"] < 32  # of 32 completions
    assert gaps[-1] > 0.7 * gaps[0]  # both negative: minus the KL, on the student's own texts

    # What was trained is the gap, made again here from the two models and the dumped tokens.
    teacher, student = hf.load_model(teacher_folder), hf.load_model(tiny_folder)
    batch = dump.load_dump(folder / "dumps" / "step_000001_update_0.npz").batch
    ls, lt = (log_probabilities(model, batch) for model in (student, teacher))
    mask = np.asarray(batch.token_mask)
    gap = np.where(mask, lt - ls, 0)
    assert abs(gap[mask].mean() - gaps[0]) < 1e-5
    expected = np.where(mask, gap - gap[mask].mean(), 0)
    np.testing.assert_allclose(batch.advantages, expected, atol=2e-5)  # float32, logits of order 10

    after = exact_kl(hf.load_model(folder / "export"), teacher, batch)
    assert after < 0.8 * exact_kl(student, teacher, batch)
