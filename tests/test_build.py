"""What a config becomes: where weights live, and who holds them."""

import jax
import numpy as np
import pytest

from grpo_jax import build, engines, loading
from grpo_jax import config as configs
from grpo_jax.core import logprobs, masks
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.data import trajectories
from grpo_jax.models import hf, presets, transformer
from grpo_jax.scale import rules
from grpo_jax.train import experts, step
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
    teacher = build.load_teacher(config, loading.load_model(config))
    query = teacher.params["layers"]["mlp"]["up"]["weight"]  # [L, F, D]
    assert query.shape == (1, 64, 48) and query.addressable_shards[0].data.shape == (1, 32, 24)
    batch = make_batch(rows=8, vocabulary=260)
    alone = hf.load_model(folders["teacher"])
    expected = logprobs.token_scores(
        alone.policy,
        alone.params,
        *(batch.tokens, batch.positions, batch.segment_ids),
        filter=FilterConfig(temperature=0.7, vocabulary=260),
        mask=batch.token_mask,
    ).logprobs
    scored = np.asarray(teacher.score(teacher.params, batch))
    np.testing.assert_allclose(scored, expected, atol=1e-5)  # float32, sums in another order
    assert np.all(np.isfinite(scored)) and np.all(scored[np.asarray(batch.token_mask)] < 0)


def test_without_distillation_no_teacher_is_loaded(folders):
    config = make_config(folders)
    assert build.load_teacher(config, loading.load_model(config)) is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_is_the_policys_trunk_and_nothing_it_does_not_use(tmp_path, tied):
    """No second head where the policy has one of its own; shards as the policy's; values of 0."""
    shape = presets.preset("tiny", num_layers=1, hidden_size=32, tie_embeddings=tied)
    hf.save_model(tmp_path / "m", shape, transformer.init_params(shape, jax.random.key(0)))
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    config = make_config({"student": tmp_path / "m"}, advantage={"estimator": "gae"}, mesh=mesh)
    model = loading.load_model(config)
    critic = build.build_critic(config, model)
    assert ("head" in model.loaded.params) == (not tied)
    assert set(critic.params["trunk"]) == {"embed", "layers", "norm"}
    places = critic.places.state.params
    policy = rules.partition(model.loaded.params, model.mesh)
    for name in critic.params["trunk"]:
        assert places["trunk"][name] == policy[name]
    assert places["value_head"]["kernel"].is_fully_replicated
    batch = make_batch(rows=8, vocabulary=260)
    arrays = (batch.tokens, batch.positions, batch.segment_ids)
    hidden = model.loaded.policy.hidden(model.loaded.params, *arrays)
    same = critic.trunk.hidden(critic.params["trunk"], *arrays)
    np.testing.assert_array_equal(hidden, same)
    assert build.build_critic(make_config({"student": tmp_path / "m"}), model) is None


def test_ids_that_pad_the_matrix_are_neither_drawn_nor_hold_mass(folders):
    """264 rows, 260 tokens: four rows of large weights change nothing in sampler and trainer."""
    config = make_config(folders, sampling={"max_new_tokens": 6})
    model = loading.load_model(config)
    assert model.sampling.filter.vocabulary == 260 and model.loaded.config.vocab_size == 264
    evaluation = config.evaluate.sampling(model.sampling)
    assert evaluation.filter.vocabulary == 260
    params = jax.tree.map(np.array, model.loaded.params)
    table = params["embed"]["table"]
    assert table.shape[0] == 264 and "head" not in params  # tied
    drawn = []
    for weight in (0.0, 50.0):
        table[260:] = weight
        rows = engines.make_engine(config, model).generate(
            params, [np.arange(97, 103)] * 2, 4, jax.random.key(0)
        )
        batch = trajectories.collate(
            rows.tokens, rows.prompt_lengths, rows.completion_lengths, rows.logprobs,
            advantages=np.ones(8),
        )  # fmt: skip
        score = step.make_score_step(model.loaded.policy, model.sampling.filter, chunk_size=5)
        np.testing.assert_allclose(score(params, batch), batch.generation_logprobs, atol=1e-5)
        drawn.append(rows)
    jax.tree.map(np.testing.assert_array_equal, *drawn)
    assert np.max(drawn[0].tokens) < 260


def test_a_vocabulary_that_the_tokenizer_does_not_know_is_refused(folders):
    for filter in ({"vocabulary": 262}, {"top_k": 262}):
        with pytest.raises(ValueError, match="=262 is more than the .*260 tokens"):
            loading.load_model(make_config(folders, sampling={"filter": filter}))
    model = loading.load_model(make_config(folders, sampling={"filter": {"vocabulary": 200}}))
    assert model.sampling.filter.vocabulary == 200


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_size": 16, "family": "qwen3_moe"}


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """A model with routed experts."""
    shape = presets.preset("tiny", num_layers=2, hidden_size=32, qk_norm=True, **EXPERTS)
    place = tmp_path_factory.mktemp("models") / "routed"
    hf.save_model(place, shape, transformer.init_params(shape, jax.random.key(0)))
    return place


def test_a_frozen_router_stays_as_it_is_on_a_mesh(routed):
    """No gradient and no decay; what tokens are sent to is the same on eight devices as on one."""
    config = make_config(
        {"student": routed},
        model={"path": str(routed), "freeze_router": True},
        optimizer={"lr": 0.01, "weight_decay": 0.1},
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
    )
    model = loading.load_model(config)
    opt = build.build_optimizer(config)
    state, places, _ = build.initial_state(model, opt, None, None)
    before = jax.device_get(state.params)
    batch = make_batch(rows=8, vocabulary=260)
    placed, counts = rules.place(batch, model.mesh), masks.count(batch)
    policy = model.loaded.policy
    train = step.make_train_step(policy, opt, LossConfig(), FilterConfig(), places=places)
    gradient = step.make_gradient_step(policy, LossConfig(), FilterConfig())
    sent = step.make_count_step(policy, places=places)(state.params, placed)
    alone = hf.load_model(routed, freeze_router=True)
    _, expected, _ = gradient(alone.params, batch, counts)
    after, metrics = train(state, placed, counts)
    assert metrics["update_applied"] == 1
    # float32, sums in another order
    np.testing.assert_allclose(
        metrics["grad_norm"], np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(expected))), 1e-4
    )
    old, new = before["layers"]["mlp"], jax.device_get(after.params)["layers"]["mlp"]
    np.testing.assert_array_equal(new["router"]["weight"], old["router"]["weight"])
    assert np.abs(new["gate"]["weight"] - old["gate"]["weight"]).max() > 1e-3
    np.testing.assert_array_equal(sent, step.make_count_step(alone.policy)(alone.params, batch))


def test_the_load_of_experts():
    counts = np.zeros((3, 2, 4), np.float32)
    counts[0, 0], counts[2, 0] = [1, 2, 1, 0], [1, 0, 1, 2]  # even
    counts[1, 1] = [8, 0, 0, 0]
    found = experts.report(counts)
    expected = {"load_max": 4.0, "load_spread": 3**0.5 / 2, "idle": 3 / 8}
    assert found == pytest.approx({f"experts/{name}": x for name, x in expected.items()})
    assert experts.report(np.zeros((3, 2, 4))) == {}


def test_a_router_that_is_not_there_cannot_be_frozen(folders):
    config = make_config(folders, model={"path": str(folders["student"]), "freeze_router": True})
    with pytest.raises(ValueError, match="freeze_router=True needs routed experts"):
        loading.load_model(config)


def test_an_adapter_and_the_experts_below_it(routed):
    """Where tokens go is counted with the adapter, which as born changes nothing."""
    targets = {"rank": 2, "targets": ["attention/(query|key)/"]}
    config = make_config({"student": routed}, lora=targets)
    model = loading.load_model(config)
    batch = make_batch(rows=8, vocabulary=260)
    found = step.make_count_step(model.policy)(model.trained, batch)
    expected = step.make_count_step(model.loaded.policy)(model.loaded.params, batch)
    np.testing.assert_array_equal(found, expected)
    frozen = {"path": str(routed), "freeze_router": True}
    with pytest.raises(configs.ConfigError, match="freeze_router = true says nothing with lora.ra"):
        loading.load_model(make_config({"student": routed}, lora=targets, model=frozen))
