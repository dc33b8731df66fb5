"""Whether a run folder is begun, resumed or refused; nothing that is there is ever lost."""

import pytest

from grpo_jax.train import folder


@pytest.fixture
def run(tmp_path):
    """An unfinished run with one checkpoint."""
    place = tmp_path / "run"
    (place / folder.CHECKPOINTS / "4").mkdir(parents=True)
    (place / folder.CONFIG).write_text("old")
    return place


def test_a_new_folder_starts(tmp_path):
    plan = folder.plan(tmp_path / "run", "auto", {})
    assert plan.action == "start" and plan.aside is None
    folder.prepare(tmp_path / "run", plan, "text")
    assert (tmp_path / "run" / folder.CONFIG).read_text() == "text"


def test_an_unfinished_run_resumes(run):
    plan = folder.plan(run, "auto", {})
    assert plan.action == "resume" and "resuming" in plan.said


def test_a_run_that_saved_nothing_starts_again(run):
    (run / folder.CHECKPOINTS / "4").rmdir()
    plan = folder.plan(run, "auto", {"optimizer.lr": (1, 2)})
    assert plan.action == "start" and "had saved nothing yet" in plan.said
    folder.prepare(run, plan, "new")  # no metrics of the old one get mixed in
    assert (run.parent / "run.old-1" / folder.CONFIG).read_text() == "old"


def test_other_settings_are_refused_by_name(run):
    with pytest.raises(ValueError, match=r"optimizer.lr: 1 there, 2 now.*run.resume to never"):
        folder.plan(run, "auto", {"optimizer.lr": (1, 2)})


@pytest.mark.parametrize("finished", [False, True])
def test_an_old_run_moves_aside_and_only_when_the_new_one_begins(run, finished):
    if finished:
        folder.finish(run, {"steps": 4})
    (run.parent / "run.old-1").mkdir()
    plan = folder.plan(run, "auto" if finished else "never", {"optimizer.lr": (1, 2)})
    assert plan.action == "start" and plan.aside == run.parent / "run.old-2"
    assert (run / folder.CONFIG).read_text() == "old"
    folder.prepare(run, plan, "new")
    assert (run.parent / "run.old-2" / folder.CONFIG).read_text() == "old"
    assert (run / folder.CONFIG).read_text() == "new"
    assert not folder.has_checkpoint(folder.checkpoints_of(run, None))
