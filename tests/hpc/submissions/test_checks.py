import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.events import of_training, recovery_of, resources_of, script_spec

from hpc.base.errors import UserError
from hpc.run.spec import RunSpec
from hpc.submissions.checks import (
    check_recovery,
    check_script,
    check_setup,
)
from training.config.train_config import TrainConfig


def with_recovery(cluster: str = "slurm", **recovery: Any) -> RunSpec:
    return script_spec(cluster=cluster, resources=resources_of(time="10m"), recovery=recovery_of(**recovery))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (with_recovery("local", spares=1), "--spares is 1, but --cluster local has no spare nodes"),
        (with_recovery("local", continue_with="job"), "--continue-with is job, but --cluster local always requeues"),
        (with_recovery(signal_before="10m"), "--signal-before is 10m, but the time limit is 10m"),
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
