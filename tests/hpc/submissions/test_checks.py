import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.events import of_training, recovery_of, resources_of, script_spec

from hpc.base.errors import UserError
from hpc.run.spec import Resources, RunSpec
from hpc.slurm.sinfo import Partition, parse_partitions
from hpc.submissions.checks import (
    check_recovery,
    check_script,
    check_setup,
    local_resources,
    resolve_resources,
)
from training.config.train_config import TrainConfig

# As sinfo prints it: two kinds of node in one partition, one without GPUs, one that is down.
SINFO = """\
gpu*|up|1-00:00:00|4:00:00|1-infinite|4|16|gpu:a100:4(S:0-1)
gpu*|up|1-00:00:00|4:00:00|1-infinite|2|64+|gpu:h100:8(S:0-1),nvme:1
cpu|up|infinite|n/a|1-infinite|10|8|(null)
small|up|30:00|n/a|1-2|9|8|gpu:2
old|down|1:00:00|n/a|1-infinite|1|8|gpu:1
"""


@pytest.fixture
def partitions() -> list[Partition]:
    return parse_partitions(SINFO)


def test_what_is_not_asked_for_comes_from_the_cluster(partitions: list[Partition]) -> None:
    resolved = resolve_resources(resources_of(gpus_per_node="4"), partitions)
    assert (resolved.partition, resolved.cpus_per_gpu, resolved.time) == ("gpu", 4, "04:00:00")
    assert resolve_resources(resources_of(gpus_per_node="2", partition="small"), partitions).time == "00:30:00"
    assert resolve_resources(resources_of(gpus_per_node="0", partition="cpu"), partitions).time == "1-00:00:00"
    # A share of these nodes' CPUs: the others, which have fewer, are not asked for.
    assert resolve_resources(resources_of(gpus_per_node="h100:2", nodes="2"), partitions).cpus_per_gpu == 8
    without_gpus = resolve_resources(resources_of(gpus_per_node="0", nodes="10", partition="cpu"), partitions)
    assert (without_gpus.ranks_per_node, without_gpus.cpus_per_node) == (1, 8)
    asked = resources_of(nodes="6", gpus_per_node="4", cpus_per_gpu=2, time="90m", partition="gpu")
    resolved = resolve_resources(asked, partitions)
    assert (resolved.nodes, resolved.cpus_per_gpu, resolved.time) == ("6", 2, "01:30:00")


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("old", "old", "partition old is down: all others are down, too; try later"),
        ("cpu", None, "no default partition: use --partition with one of cpu"),
    ],
)
def test_cluster_without_a_partition_to_use_is_told(
    name: str, asked: str | None, message: str, partitions: list[Partition]
) -> None:
    with pytest.raises(UserError, match=message):
        resolve_resources(Resources(partition=asked), [kind for kind in partitions if kind.name == name])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (resources_of(nodes="7"), "--nodes is 7, but partition gpu has 6"),
        (resources_of(nodes="3", gpus_per_node="8"), "--nodes is 3, but partition gpu has 2 with 8 or more GPUs"),
        (resources_of(nodes="3", partition="small"), "--nodes is 3, but partition small allows 2 per job"),
        (resources_of(gpus_per_node="9"), "--gpus-per-node is 9, but partition gpu has 8 per node"),
        (
            resources_of(gpus_per_node="4", partition="small"),
            "has 2 per node: use --gpus-per-node 2 or fewer, or .* gpu",
        ),
        (Resources(partition="cpu"), "has 0 per node: use --gpus-per-node 0 to train on CPUs, or .* gpu, old, small"),
        (
            resources_of(gpus_per_node="v100:2"),
            "is v100:2, but partition gpu has a100:4, h100:8 per node: use one of these, or fewer$",
        ),
        (
            resources_of(gpus_per_node="a100:2", partition="small"),
            "small has 2 without a type per node: use --gpus-per-node 2 or fewer, or one of the partitions gpu",
        ),
        (resources_of(nodes="3", gpus_per_node="h100:8"), "partition gpu has 2 with 8 or more h100 GPUs"),
        (resources_of(gpus_per_node="0", partition="cpu", cpus_per_gpu=9), "has 8 per rank .*use --cpus-per-gpu 8"),
        (
            Resources(partition="gpus"),
            "--partition 'gpus' does not exist: use --partition with one of gpu, cpu, small, old",
        ),
        (Resources(partition="old"), "partition old is down"),
        (resources_of(time="25h"), "--time is 25h, but partition gpu allows 1-00:00:00"),
        (resources_of(gpus_per_node="4", cpus_per_gpu=17), "--cpus-per-gpu is 17.*use --cpus-per-gpu 16 or fewer"),
    ],
)
def test_resources_that_the_partition_lacks_are_refused(
    asked: Resources, message: str, partitions: list[Partition]
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve_resources(asked, partitions)
    assert "\n" not in str(caught.value)


def test_pretended_nodes_share_the_cpus_and_know_no_types_of_gpus() -> None:
    assert local_resources(resources_of(nodes="100", gpus_per_node="100")).cpus_per_gpu == 1
    assert local_resources(resources_of(gpus_per_node="0")).cpus_per_node == os.cpu_count()
    with pytest.raises(UserError, match=r"is a100:2, but --cluster local .*: use --gpus-per-node 2"):
        local_resources(resources_of(gpus_per_node="a100:2"))


@pytest.mark.parametrize(
    ("nodes", "spares", "message"),
    [
        ("5", 2, "--nodes is 5 and --spares 2, but partition gpu has 6: use --spares 1 or fewer"),
        ("7", 1, "--nodes is 7 and --spares 1, but partition gpu has 6: use --nodes 6 or fewer"),
    ],
)
def test_spares_are_nodes_too(nodes: str, spares: int, message: str, partitions: list[Partition]) -> None:
    with pytest.raises(UserError, match=message):
        resolve_resources(resources_of(nodes=nodes), partitions, spares)
    assert resolve_resources(resources_of(nodes="5"), partitions, spares=1).nodes == "5"


def with_recovery(cluster: str = "slurm", **recovery: Any) -> RunSpec:
    return script_spec(cluster=cluster, resources=resources_of(time="00:10:00"), recovery=recovery_of(**recovery))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (with_recovery("local", spares=1), "--spares is 1, but --cluster local has no spare nodes"),
        (with_recovery("local", continue_with="job"), "--continue-with is job, but --cluster local always requeues"),
        (with_recovery(signal_before="10m"), "--signal-before is 10m, but the time limit is 00:10:00"),
        (with_recovery(grace_period="10m"), "--grace-period is 10m, but .*: use a shorter --grace-period"),
        (
            replace(with_recovery(stop_signal="USR1"), **of_training(TrainConfig(data="/d"))),
            "--stop-signal is USR1, but it applies only to your own script: leave it out",
        ),
    ],
)
def test_impossible_recovery_is_refused(spec: RunSpec, message: str) -> None:
    check_recovery(with_recovery(spares=1, signal_before="9m"))
    with pytest.raises(UserError, match=message):
        check_recovery(spec)


def test_slurm_checks_and_local_runs_have_the_same_default_limit(
    partitions: list[Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc.run.spec._DEFAULT_LIMIT_MINUTES", 120, raising=False)
    asked = resources_of(gpus_per_node="0", partition="cpu")
    assert resolve_resources(asked, partitions).time == "02:00:00"
    assert local_resources(asked).time == "02:00:00"
    with pytest.raises(UserError, match="--signal-before is 3h, but the time limit is 02:00:00"):
        check_recovery(script_spec(resources=asked, recovery=recovery_of(signal_before="3h")))


def test_setup_that_could_not_run_is_refused() -> None:
    check_setup(["module load cuda/12.4", "if true\nthen\n  source it\\'s.sh\nfi"], "slurm")
    with pytest.raises(
        UserError, match=r"--setup 'if true' is not valid Bash \(.*unexpected end of file.*\): write each --setup"
    ):
        check_setup(["true", "if true"], "slurm")
    with pytest.raises(UserError, match="--setup is 'true', but --cluster local has no batch script: type it in this"):
        check_setup(["true"], "local")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (("-m",), "-m needs the name of a module: -- -m package.module ARGS"),
        (("-m", "a/b.py"), "-m needs the name of a module: -- -m package.module ARGS"),
        (("absent.py",), "script 'absent.py' does not exist: give the path of a Python file after --"),
        (
            ("-m", "a.b", "--x={data}"),
            "'--x={data}' asks for the place of the data on the node, but there is no --data",
        ),
    ],
)
def test_script_that_could_not_start_is_refused(script: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_script(script, has_data=False)


@pytest.mark.parametrize(
    ("typed", "own"),
    [
        ("python train.py --lr 0.1", "-- train.py --lr 0.1"),
        ("accelerate launch --num_processes 4 train.py 'a b'", "-- train.py 'a b'"),
        ("torchrun --nproc-per-node 4 -m pkg.train --lr 1", "-- -m pkg.train --lr 1"),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py", "-- train.py"),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "-- train.py --deepspeed ds.json"),
        ("uv run python train.py", "-- train.py"),
    ],
)
def test_a_launcher_is_refused_with_the_script_that_it_starts(
    typed: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    name = shlex.split(typed)[0]
    message = f"{name!r} is not a Python file, and hpc submit itself starts the ranks: type {own}"
    with pytest.raises(UserError) as refused:
        check_script(tuple(shlex.split(typed)), has_data=False)
    assert str(refused.value) == message
