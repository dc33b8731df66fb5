"""Wrong input ends in one line that names the value, the limit and the way out."""

import json
from pathlib import Path

import pytest
import yaml

from grpo_jax import cli
from grpo_jax import config as configs
from grpo_jax.models import hf, presets
from tests.e2e.conftest import changed

REPOSITORY = Path(__file__).parents[2]


GAE = {"advantage": {"estimator": "gae"}}
ONE = GAE | {"rollout": {"prompts_per_step": 8, "completions_per_prompt": 1}}
GDPO = {
    "advantage": {"estimator": "gdpo"},
    "reward": {"components": [{"kind": "verifier"}, {"kind": "length", "weight": 0.5}]},
}
OPD = {"advantage": {"estimator": "opd"}, "teacher": {"path": "some/folder"}}


def refused(capsys, *arguments: object) -> str:
    """Run a command that must fail, and return its message."""
    assert cli.main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_no_command_prints_the_usage(capsys):
    assert cli.main([]) == 2
    assert "usage: grpo-jax COMMAND" in capsys.readouterr().out
    assert cli.main(["--help"]) == 0


def test_unknown_command_names_the_nearest(capsys):
    assert "Did you mean 'train'?" in refused(capsys, "trian")


def test_config_file_not_there(capsys):
    assert "'nowhere.yaml' is not there" in refused(capsys, "train", "nowhere.yaml")
    assert "needs a config file first" in refused(capsys, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {learning_rate: 1}", "unknown key 'optimizer.learning_rate'"),
        ("optimizer: {schedul: linear}", "Did you mean 'schedule'?"),
        ("lr: 1", "unknown key 'lr'. Did you mean 'optimizer.lr'?"),
        ("run: {steps: many}", "run.steps = 'many' (str) must be a whole number"),
        ("run: {steps: 1.5}", "run.steps = 1.5 (float) must be a whole number"),
        ("report: {progress: 1}", "report.progress = 1 (int) must be true or false"),
        ("run: {steps: 0}", "steps = 0 must be at least 1"),
        ("run: 3", "run = 3 (int) must be a mapping of keys"),
        ("optimizer: {schedule: lineer}", "Did you mean 'linear'?"),
        ("loss_fn: {ratio_clip_c: 0.5}", "ratio_clip_c"),
        ("run: [", "is not valid YAML"),
        ("evaluate: {pass_k: [8]}", "raise completions to 8"),
    ],
)
def test_wrong_config(capsys, tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert message in refused(capsys, "config", path)


def test_mistyped_override_names_the_nearest(capsys, write_config, base_config):
    path = write_config(base_config)
    message = refused(capsys, "config", path, "--optimizer.lrr", "1")
    assert "unknown override --optimizer.lrr. Did you mean 'optimizer.lr'?" in message


def test_overrides_win_over_the_file_and_print_back(capsys, write_config, base_config):
    path = write_config(base_config)
    assert cli.main(["config", str(path), "--optimizer.lr", "0.5", "--loss-fn.use-cispo"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["optimizer"]["lr"] == 0.5
    assert printed["loss_fn"]["use_cispo"] is True
    assert configs.from_dict(printed) == configs.from_dict(
        changed(base_config, optimizer={"lr": 0.5}, loss_fn={"use_cispo": True})
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"completions_per_prompt": 1}}, "rollout.completions_per_prompt = 1"),
        ({"rollout": {"updates_per_rollout": 3}}, "use a divisor of 8"),
        ({"rollout": {"micro_batch_size": 3}}, "micro_batch_size = 3 does not divide the 4 rows"),
        ({"loss_fn": {"force_on_policy_ratio": True}}, "no longer on-policy"),
        (
            {
                "loss_fn": {"force_on_policy_ratio": True},
                "rollout": {"updates_per_rollout": 1, "epochs": 2},
            },
            "rollout.epochs = 2: the second update is no longer on-policy",
        ),
        (GAE | {"critic": {"warmup_steps": 6}}, "leaves none of run.steps = 6 to the policy"),
        (
            {"critic": {"warmup_steps": 2}},
            "critic.warmup_steps = 2 is read by the estimator gae only",
        ),
        (ONE | {"filters": {"use_dynamic_sampling": True}}, "always a constant group"),
        (ONE | {"filters": {"drop_constant_groups": True}}, "always a constant group"),
        ({"advantage": {"estimator": "opd"}}, "teacher.path names none"),
        ({"teacher": {"path": "x"}}, "teacher.path = 'x' is read by the estimator opd only"),
        (OPD | {"filters": {"use_dynamic_sampling": True}}, "does not learn from"),
        (OPD | {"filters": {"drop_constant_groups": True}}, "filters.drop_constant_groups = true"),
        (OPD | {"shaping": {"enabled": True, "stop_properly_penalty_coef": 0.5}}, "shaping.enab"),
        (OPD | {"shaping": {"scaling": {"enabled": True}}}, "shaping.scaling.enabled = true"),
        ({"advantage": {"estimator": "gdpo"}}, "needs at least two reward components"),
        (GDPO | {"advantage": {"estimator": "gdpo", "reward_weights": [1.0]}}, "has 1 entries"),
        (
            GDPO | {"shaping": {"enabled": True, "stop_properly_penalty_coef": 0.5}},
            "make the penalty a component of its own",
        ),
        (
            {"evaluate": {"stop_metric": "eval/mean_rewards"}},
            "in no evaluation of this run. Did you mean 'eval/mean_reward'?",
        ),
        ({"evaluate": {"stop_metric": "eval/avg@1"}}, "evaluate.stop_metric = 'eval/avg@1' is in"),
        ({"evaluate": {"stop_metric": "reward/mean"}}, "eval/length/mean"),
        (
            {"checkpoint": {"keep_best": 1, "metric": "eval/pass@8"}},
            "checkpoint.metric = 'eval/pass@8' is in no evaluation",
        ),
        ({"loss_fn": {"use_kl_in_reward": True}}, "nothing puts it into the reward"),
        ({"advantage": {"kl_in_reward": 0.1}}, "is read by reinforce_plus_plus and gae only"),
        ({"sampling": {"filter": {"temperature": 0}}}, "nothing to learn from"),
    ],
)
def test_settings_that_do_not_fit_together(capsys, write_config, base_config, sections, message):
    path = write_config(changed(base_config, **sections))
    assert message in refused(capsys, "config", path)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "no/such/folder"}}, "no/such/folder"),
        ({"model": {"path": str(REPOSITORY / "docs")}}, "config.json"),
        ({"tokenizer": {"path": None}}, "no tokenizer that transformers can read"),
        ({"data": {"source": "jsonl", "path": "missing.jsonl"}}, "'missing.jsonl' is not there"),
        ({"data": {"name": "chain_sums"}}, "chain_sum"),
        ({"data": {"max_prompt_tokens": 5}}, "max_prompt_tokens=5"),
        ({"data": {"max_prompt_tokens": 5, "too_long": "error"}}, "max_prompt_tokens=5"),
        ({"rollout": {"prompts_per_step": 4096}}, "do not fill one batch of 4096"),
        ({"report": {"tensorbord": True}}, "Did you mean 'tensorboard'?"),
    ],
)
def test_train_refuses_before_it_leaves_a_folder(
    capsys, write_config, base_config, tmp_path, sections, message
):
    config = changed(base_config, **sections)
    config["run"]["dir"] = str(tmp_path / "run")
    assert message in refused(capsys, "train", write_config(config))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_filters_and_minimum_lengths_warn_by_name(base_config):
    config = configs.from_dict(
        changed(
            base_config,
            sampling={"filter": {"top_k": 5}, "min_new_tokens": 2},
            advantage={"estimator": "reinforce_plus_plus", "kl_in_reward": 0.1},
        )
    )
    text = " ".join(configs.validate(config))
    assert "policy_support_excluded_tokens" in text
    assert "min_new_tokens" in text and "paid twice" in text
    correction = {"use_importance_sampling_correction": True, "token_level_loss": False}
    assert not configs.validate(configs.from_dict(changed(base_config, loss_fn=correction)))
    gspo = {"sequence_level_importance_ratios": True, **correction}
    text = " ".join(configs.validate(configs.from_dict(changed(base_config, loss_fn=gspo))))
    assert "product over the response, which vanishes or explodes" in text  # pitfall P-28
    distilling = configs.from_dict(changed(base_config, **OPD))
    assert "while the teacher pulls away" in " ".join(configs.validate(distilling))


@pytest.mark.parametrize(
    ("sections", "warnings"),
    [
        ({}, []),
        (
            {"advantage": {"gae_lambda": 0.9, "reward_weights": [1.0]}},
            [
                "advantage.reward_weights = (1.0,) changes nothing: the estimator 'grpo' does not",
                "advantage.gae_lambda = 0.9 changes nothing: the estimator 'grpo' does not read it",
            ],
        ),
        (
            {"advantage": {"normalize_rewards": False, "normalize_by": "batch"}},
            ["advantage.normalize_by = 'batch' changes nothing: normalize_rewards is false"],
        ),
        (
            {"shaping": {"max_response_length": 9, "scaling": {"target_max": 2.0}}},
            [
                "shaping.max_response_length = 9 changes nothing: shaping.enabled is false",
                "changes nothing: shaping.scaling.enabled is false",
            ],
        ),
        (
            {
                "shaping": {
                    "enabled": True,
                    "stop_properly_penalty_coef": 0.5,
                    "overlong_buffer_length": 7,
                }
            },
            ["shaping.overlong_buffer_length = 7 changes nothing: stop_properly_penalty_coef is"],
        ),
        (
            {"filters": {"on_shortage": "error", "constant_tolerance": 0.1}},
            [
                "filters.on_shortage = 'error' changes nothing: filters.use_dynamic_sampling is",
                "filters.constant_tolerance = 0.1 changes nothing: no filter looks for",
            ],
        ),
        (
            {"evaluate": {"stop_metric": "eval/reward/score"}},
            ["evaluate.stop_metric = 'eval/reward/score' is never looked at between start and end"],
        ),
        ({"evaluate": {"stop_metric": "eval/pass@1", "every": 2}}, []),
        (
            {"checkpoint": {"keep_best": 1}, "evaluate": {"every": 4}},
            ["make checkpoint.every = 2 a multiple of evaluate.every = 4"],
        ),
        ({"checkpoint": {"keep_best": 1}, "evaluate": {"every": 1}}, []),
        ({"checkpoint": {"keep_best": 1, "metric": "reward/mean"}}, []),
        (GDPO, ["reward.components.1.weight = 0.5 weighs the logged total only"]),
    ],
)
def test_keys_that_change_nothing_are_named(base_config, sections, warnings):
    found = configs.validate(configs.from_dict(changed(base_config, **sections)))
    assert len(found) == len(warnings), found
    for text, wanted in zip(found, warnings, strict=True):
        assert wanted in text


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--filters.overlong-filtering"], True),
        (["--filters.overlong-filtering", "True"], True),
        (["--filters.overlong_filtering=true"], True),
        (["--filters.overlong-filtering", "--filters.overlong-filtering", "false"], False),
        (["--filters.no-overlong-filtering"], False),
    ],
)
def test_switches_take_a_value_too(write_config, base_config, words, value):
    path = write_config(changed(base_config, filters={"overlong_filtering": not value}))
    config, options = cli.parse_with([str(path), *words, "--out", "x"], "eval", cli.EvalOptions)
    assert config.filters.overlong_filtering is value and options.out == "x"


def test_a_switch_that_is_given_something_else_says_what_to_write(
    capsys, write_config, base_config
):
    path = write_config(base_config)
    message = refused(capsys, "config", path, "--filters.overlong-filtering", "yes")
    assert "write --filters.overlong-filtering or" in message
    assert "--filters.no-overlong-filtering or" in message


def test_the_file_of_an_evaluation_is_checked_before_the_work(capsys, write_config, base_config):
    path = write_config(base_config)
    message = refused(capsys, "eval", path, "--out", "no/such/folder/x.json")
    assert "no/such/folder/x.json cannot be written" in message


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_help_of_a_command_with_options_points_at_the_keys_of_the_config(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--checkpoint" in text and "`grpo-jax train CONFIG --help` lists them" in text


def test_a_critic_warns_of_what_makes_its_values_wrong(base_config):
    chosen = {
        "critic": {"value_loss": {"cliprange": 0.2}},
        "filters": {"drop_constant_groups": True},
    }
    config = changed(base_config, rollout={"updates_per_rollout": 1}, **GAE, **chosen)
    text = " ".join(configs.validate(configs.from_dict(config)))
    assert "critic.warmup_steps = 0" in text and "cliprange = 0.2 clips nothing" in text
    assert "filters.drop_constant_groups = true shows the critic only prompts with" in text
    better = {"filters": {"drop_constant_groups": False}, "critic": {"warmup_steps": 1}}
    good = changed(config, rollout={"epochs": 2}, **better)
    assert configs.validate(configs.from_dict(good)) == []


def test_a_teacher_that_does_not_fit_is_refused(capsys, write_config, base_config, tmp_path):
    rows = {"micro_batch_size": 1, "updates_per_rollout": 1}  # eight, on the test's eight devices
    config = changed(base_config, run={"dir": str(tmp_path / "run")}, rollout=rows, **OPD)
    path = write_config(config)
    assert "some/folder" in refused(capsys, "train", path)
    for settings, message in (
        (dict(vocab_size=260), "knows 260 token ids, and the policy writes 264"),
        (dict(max_length=64), "has a context of 64 tokens"),
    ):
        folder = tmp_path / next(iter(settings))
        folder.mkdir()
        fields = hf.hf_config.config_to_fields(presets.preset("tiny", **settings))
        (folder / "config.json").write_text(json.dumps(fields))
        assert message in refused(capsys, "train", path, "--teacher.path", folder)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_config_in_the_repository_loads(path):
    configs.validate(configs.load(path))


def test_base_yaml_is_the_code():
    """Every key with its default, and a comment on each."""
    path = REPOSITORY / "configs" / "base.yaml"
    assert configs.load(path) == configs.Config()
    written = set(configs._flatten(yaml.safe_load(path.read_text())))
    assert written == set(configs._flatten(configs.to_dict(configs.Config())))
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    for before, line in zip(lines, lines[1:], strict=False):
        assert "#" in line or before.lstrip().startswith("#"), f"no comment: {line}"


def test_round_trip_of_every_value():
    config = configs.load(REPOSITORY / "configs" / "quickstart.yaml")
    assert configs.from_dict(yaml.safe_load(configs.dump(config))) == config
