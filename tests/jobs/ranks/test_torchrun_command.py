from dataclasses import replace

import pytest

from hpc.base.transport import pick_port
from jobs.node_attempt import NodeAllocation, find_allocation
from jobs.ranks.torchrun_command import Rendezvous, torchrun_argv, torchrun_environment


def test_allocation_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "3", "SLURM_PROCID": "2",
        "SLURM_JOB_NODELIST": "gpu[01-02,07]", "SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS": "3", "SLURM_NODEID": "2",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    allocation = find_allocation(environment)
    assert allocation == NodeAllocation(
        cluster="slurm", job_id="42", restart=3, node_rank=2, hostnames=("gpu01", "gpu02", "gpu07"), cpus=8
    )
    assert (allocation.first_node, allocation.host, allocation.is_first) == ("gpu01", "gpu07", False)


def test_allocation_from_submitits_local_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "99", "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    allocation = find_allocation(environment)
    assert (allocation.cluster, allocation.job_id, allocation.node_rank, allocation.num_nodes) == ("local", "99", 1, 2)


MEETING = Rendezvous(run="r", attempt=1, secret="n", round=1, num_nodes=2, host="10.0.0.2", port=12345, node=0)


def test_rendezvous_id_differs_by_attempt_and_round() -> None:
    ids = {replace(MEETING, attempt=attempt, round=number).id for attempt in (1, 2) for number in (1, 2)}
    assert len(ids) == 4


def test_the_secret_is_in_torchruns_environment_and_not_in_its_arguments() -> None:
    rendezvous = replace(MEETING, secret="5ecret")
    assert "5ecret" not in " ".join(torchrun_argv(rendezvous, 4, "10.0.0.1", "python", ["program"]))
    assert "5ecret" in torchrun_environment(rendezvous, {"HOME": "/"}).values()


def test_all_members_have_the_same_first_one() -> None:
    for node in (0, 1):
        argv = torchrun_argv(replace(MEETING, node=node), 4, "10.0.0.1", "python", ["echo", "$HOME"])
        assert f"--rdzv-conf=rank={node}" in argv
        assert "--rdzv-endpoint=10.0.0.2:12345" in argv
        assert "--nnodes=2" in argv
        assert "--nproc-per-node=4" in argv
        assert argv[-4:] == ["--no-python", "--", "echo", "$$HOME"]


def test_ipv6_addresses_are_in_brackets_for_torchrun() -> None:
    assert "--rdzv-endpoint=[fd77::2]:12345" in torchrun_argv(
        replace(MEETING, host="fd77::2"), 1, "::1", "python", ["p"]
    )


def test_ports_of_a_range() -> None:
    ports = range(23_000, 23_020)
    assert all(pick_port(ports) in ports for _ in range(20))
    argv = torchrun_argv(replace(MEETING, ports=ports), 1, "10.0.0.1", "python", ["p"])
    assert "--rdzv-conf=rank=0,ports=23000-23019" in argv
