"""Which list of processes an environment shows; what several processes do is in tests/e2e."""

import pytest

from grpo_jax.scale import multihost
from grpo_jax.scale.multihost import ProcessesConfig

ADDRESSES = dict(zip(multihost.ADDRESSES, ("10.0.0.1:1234", "2", "0"), strict=True))
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("environment", "on_tpu_vm", "found"),
    [
        ({}, False, "none"),
        (ADDRESSES, False, "addresses"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, False, "none"),  # a batch script, no srun
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "8"}, False, "slurm"),
        ({}, True, "tpu"),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, "none"),
        (KUBERNETES, False, "kubernetes"),
        (KUBERNETES, True, "tpu"),
        (KUBERNETES | ADDRESSES, False, "addresses"),
    ],
)
def test_the_environment_decides(environment, on_tpu_vm, found):
    assert multihost.detect(ProcessesConfig(), environment, on_tpu_vm) == found


def test_none_is_alone_whatever_the_environment_says():
    assert multihost.detect(ProcessesConfig(cluster="none"), ADDRESSES, True) == "none"


def test_a_cluster_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="processes.cluster = 'slurm', and the environment shows"):
        multihost.detect(ProcessesConfig(cluster="slurm"), ADDRESSES, False)


def test_half_a_list_of_addresses_is_refused_by_name():
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID not set"):
        multihost.detect(ProcessesConfig(), {"JAX_NUM_PROCESSES": "2"}, False)


def test_limits_below_a_second_are_refused():
    with pytest.raises(ValueError, match="wait_limit = 0.5 must be at least 1 second"):
        ProcessesConfig(wait_limit=0.5)


def test_shares_cover_everything_once(monkeypatch):
    monkeypatch.setattr(multihost, "count", lambda: 3)
    shares = []
    for number in range(3):
        monkeypatch.setattr(multihost, "index", lambda number=number: number)
        shares.append(multihost.my_share(8))
    assert [i for share in shares for i in range(8)[share]] == list(range(8))
    assert {len(range(8)[share]) for share in shares} == {2, 3}


def test_an_error_of_one_process_is_named_in_the_others():
    wrong, dead = multihost._Failure(ValueError("lr is -1")), multihost._Failure(OSError("disk"))
    with pytest.raises(ValueError, match="process 1, the set-up: lr is -1"):
        multihost._raise_failures([None, wrong], "the set-up")
    with pytest.raises(RuntimeError, match="process 0, the set-up: disk"):
        multihost._raise_failures([dead, None], "the set-up")
