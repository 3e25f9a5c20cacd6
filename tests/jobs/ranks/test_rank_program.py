"""What the ranks execute of a program: its placeholders, modules and stop signals."""

import signal
from pathlib import Path

import pytest
from support.events import script_spec

from hpc.run.spec import Recovery
from hpc.run.spec_file import LIBRARY_PATH, script_program
from jobs.ranks.rank_program import TopLevel, program_argv
from jobs.ranks.round import stop_signals

CODE = Path("/runs/r/code")
PLACES = {"run_dir": "/runs/r", "attempt": 2, "data": "/tmp/{attempt}"}


def test_placeholders_stand_for_what_the_environment_has_and_other_braces_stay() -> None:
    script = script_program(("a/train.py", "{data}/x", "{run_dir}:{attempt}", "{lr} {} {{", "-m"))
    argv = program_argv(script, CODE, PLACES)
    assert argv == ["/runs/r/code/a/train.py", "/tmp/{attempt}/x", "/runs/r:2", "{lr} {} {{", "-m"]
    assert program_argv(script_program(("t.py", "{data}")), CODE, {})[1:] == ["{data}"]


def test_script_is_found_from_the_working_directory(tmp_path: Path) -> None:
    given = script_program(("../lib/train.py",))
    argv = program_argv(given, CODE / "conf", {})
    assert argv == ["/runs/r/code/lib/train.py"], "its directory is the first of sys.path"
    for name in ("lib/train.py", "conf/pkg/train.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("import torch, wandb\n")
    (tmp_path / "conf/x").mkdir()
    for script in (given, script_program(("-m", "pkg.train"))):
        assert TopLevel.read(script, tmp_path / "conf", [str(tmp_path)]).imports == ("torch",)


def test_module_is_found_where_the_submission_has_found_it() -> None:
    module = script_program(("-m", "pkg.train", "{attempt}"))
    assert program_argv(module, CODE, PLACES) == ["-m", "pkg.train", "2"]
    assert module.import_path == ("{code}", "{code}/src", LIBRARY_PATH)
    assert script_program(("train.py",)).import_path == ("{code}", LIBRARY_PATH)


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
def test_a_rank_gets_the_signal_that_came_or_else_another_that_it_handles(
    received: str, wanted: str, sent: list[str]
) -> None:
    found = stop_signals(script_spec(recovery=Recovery(stop_signal=wanted)), signal.Signals[received])
    assert [number.name for number in found] == sent
