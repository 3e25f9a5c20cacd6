"""A user's script that runs in a fork of torchrun finds what it would find in a Python of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT

from hpc.core.nodedir import NodeDir
from jobs.ranks.torchrun import PROCESS_WRAPPER
from jobs.ranks.user_script import TopLevel

# As torchrun does it: modules of ours are imported, multiprocessing forks the wrapper, which forks the rank.
TORCHRUN = """
import multiprocessing, runpy, signal, sys
import numpy, hpc.core.files, training.runtime.preload
sys.path.remove({root!r})
signal.signal(signal.SIGINT, lambda *_: None)
sys.argv = sys.argv[1:]
wrapper = multiprocessing.get_context("fork").Process(
    target=runpy.run_path, args=(sys.argv[0],), kwargs={{"run_name": "__main__"}}
)
wrapper.start()
wrapper.join()
sys.exit(wrapper.exitcode)
"""
REPORTS = """
import atexit, json, multiprocessing, os, signal, sys, threading, time
import training

record = {
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "training": training.OURS,
    "process": multiprocessing.current_process().name, "parent": multiprocessing.parent_process(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "main": sys.modules["__main__"].__dict__ is globals(), "package": __package__ or "",
    "thread": threading.current_thread() is threading.main_thread(),
}
sys.stdout.write("no line")  # is there at once
print(len(os.read(os.open(sys.argv[1], os.O_RDONLY), 100)), flush=True)
atexit.register(print, "at exit")
def late():
    time.sleep(0.2)
    print("late")
threading.Thread(target=late).start()
print(json.dumps(record, sort_keys=True))
sys.exit(7)
"""


def run_forked(directory: Path, *program: str) -> tuple[int, str]:
    """The exit code and the log of a rank."""
    log = directory / "rank-00.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-c", TORCHRUN.format(root=str(ROOT)), str(PROCESS_WRAPPER), "rank"]
    done = subprocess.run(
        [*command, str(directory), str(directory), "script", *program], cwd=directory, check=False,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": f"{ROOT}:{directory}"},
    )  # fmt: skip
    return done.returncode, log.read_text()


def run_plain(directory: Path, *program: str) -> tuple[int, str]:
    """The same of a Python that executes the program."""
    log = directory / "rank-00.log"
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-u", *program], cwd=directory, stdout=file, stderr=file, check=False,
            env={**os.environ, "PYTHONPATH": str(directory)},
        )  # fmt: skip
    return done.returncode, log.read_text()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A user's code, with a package that is named as one of ours; and a node's directories."""
    for directory in NodeDir(tmp_path).directories:
        directory.mkdir(parents=True, exist_ok=True)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").write_text("OURS = False\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(REPORTS)
    return tmp_path


@pytest.mark.parametrize("program", [("train.py",), ("-m", "package.train")])
def test_script_finds_what_it_finds_elsewhere_and_ends_likewise(code: Path, program: tuple[str, ...]) -> None:
    path = program if program[0] == "-m" else (str(code / program[0]),)
    forked = run_forked(code, *path, str(code / "rank-00.log"), "--flag")
    assert forked == run_plain(code, *path, str(code / "rank-00.log"), "--flag")
    assert forked[0] == 7
    first, record, *rest = forked[1].splitlines()
    assert first == "no line7"
    assert json.loads(record)["argv"][-1] == "--flag"
    assert rest == ["late", "at exit"]


ENDS = ["", "sys.exit()", "sys.exit(3)", "sys.exit('no data')", "def f(): raise ValueError('no luck')\nf()", "1 +"]


@pytest.mark.parametrize("end", ENDS)
def test_script_ends_as_elsewhere(code: Path, end: str) -> None:
    (code / "train.py").write_text(f"import sys\n{end}\n")
    assert run_forked(code, str(code / "train.py")) == run_plain(code, str(code / "train.py"))


def test_ranks_draw_different_random_numbers(code: Path) -> None:
    (code / "train.py").write_text("import random, numpy\nprint(random.random(), numpy.random.rand())\n")
    draws = [run_forked(code, str(code / "train.py"))[1].split() for _ in range(2)]
    assert all(first != second for first, second in zip(*draws, strict=True))


def test_what_a_script_imports_is_imported_before_the_ranks_fork() -> None:
    source = b"""
import os, torch.utils.data as data
import pandas
from torchvision.transforms import v2
from . import helpers
def main():
    os.environ["A"] = "b"
if __name__ == "__main__":
    os.environ["C"] = "d"
"""
    found = TopLevel.parse(source)
    assert found.imports == ("torch.utils.data", "torchvision.transforms", "torchvision.transforms.v2")
    assert not found.prepares_imports


@pytest.mark.parametrize(
    "line", ["os.environ['OMP_NUM_THREADS'] = '4'", "os.putenv('A', 'b')", "environ.update(a='b')"]
)
def test_script_that_prepares_its_imports_runs_in_a_python_of_its_own(line: str) -> None:
    assert TopLevel.parse(f"import os\n{line}\nimport torch\n".encode()).prepares_imports
    assert not TopLevel.parse(f"import os, torch\n{line}\n".encode()).prepares_imports
