"""What the ranks execute of a user's script: its placeholders, modules and stop signals."""

import signal
from pathlib import Path

import pytest

from hpc.spec import Recovery, Resources, RunSpec
from jobs.ranks.round import stop_signals
from jobs.ranks.user_script import TopLevel, import_path, script_argv
from training.config.train_config import TrainConfig

CODE = Path("/runs/r/code")
VARIABLES = {"TORCHRELAY_RUN_DIR": "/runs/r", "TORCHRELAY_ATTEMPT": "2", "TORCHRELAY_DATA": "/tmp/{attempt}"}


def spec(*script: str, stop_signal: str = "auto", working_directory: str = ".") -> RunSpec:
    recovery = Recovery(stop_signal=stop_signal)
    train = None if script else TrainConfig(data="/d")
    return RunSpec(
        name="r", cluster="slurm", data=None, stage_dir="/tmp", resources=Resources(), script=script, train=train,
        recovery=recovery, working_directory=working_directory,
    )  # fmt: skip


def test_placeholders_stand_for_what_the_environment_has_and_other_braces_stay() -> None:
    argv = script_argv(spec("a/train.py", "{data}/x", "{run_dir}:{attempt}", "{lr} {} {{", "-m"), CODE, VARIABLES)
    assert argv == ["/runs/r/code/a/train.py", "/tmp/{attempt}/x", "/runs/r:2", "{lr} {} {{", "-m"]
    assert script_argv(spec("t.py", "{data}"), CODE, {})[1:] == ["{data}"]


def test_script_is_found_from_the_working_directory(tmp_path: Path) -> None:
    given = spec("../lib/train.py", working_directory="conf")
    assert script_argv(given, CODE, {}) == ["/runs/r/code/lib/train.py"], "its directory is the first of sys.path"
    for name in ("lib/train.py", "conf/pkg/train.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("import torch, wandb\n")
    (tmp_path / "conf/x").mkdir()
    for script in (given, spec("-m", "pkg.train", working_directory="conf")):
        assert TopLevel.read(script, tmp_path).imports == ("torch",)


def test_module_is_found_where_the_submission_has_found_it() -> None:
    assert script_argv(spec("-m", "pkg.train", "{attempt}"), CODE, VARIABLES) == ["-m", "pkg.train", "2"]
    assert import_path(spec("-m", "pkg.train"), CODE) == ["/runs/r/code", "/runs/r/code/src"]
    assert import_path(spec("train.py"), CODE) == ["/runs/r/code"]


@pytest.mark.parametrize(
    ("received", "wanted", "sent"),
    [
        ("SIGTERM", "auto", ["SIGTERM", "SIGUSR2"]),
        ("SIGUSR2", "auto", ["SIGUSR2", "SIGTERM"]),
        ("SIGINT", "auto", ["SIGTERM", "SIGUSR2"]),
        ("SIGTERM", "USR1", ["SIGUSR1"]),
        ("SIGUSR2", "SIGINT", ["SIGINT"]),
    ],
)
def test_stop_signals_of_a_script(received: str, wanted: str, sent: list[str]) -> None:
    found = stop_signals(spec("train.py", stop_signal=wanted), signal.Signals[received])
    assert [number.name for number in found] == sent


def test_our_trainer_gets_the_signal_that_came() -> None:
    assert stop_signals(spec(), signal.SIGUSR2) == [signal.SIGUSR2]
