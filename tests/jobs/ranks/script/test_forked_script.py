"""A user's script that runs in a fork of torchrun finds what it would find in a Python of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import ROOT

from hpc.run.nodedir import NodeDir
from jobs.ranks.rank_program import TopLevel
from jobs.ranks.torchrun import PROCESS_WRAPPER

# As torchrun does it: modules of ours are imported, multiprocessing forks the wrapper, which forks the rank.
TORCHRUN = """
import importlib, multiprocessing, os, runpy, signal, sys
import numpy, hpc.base.files, training.config.classifier_program
for name in filter(None, os.environ["PRELOAD"].split(",")):
    importlib.import_module(name)
sys.path.remove({root!r})
signal.signal(signal.SIGINT, lambda *_: None)
sys.argv = sys.argv[1:]
wrappers = []
for rank in range(int(os.environ["RANKS"])):
    os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank)}}
    wrapper = multiprocessing.get_context("fork").Process(
        target=runpy.run_path, args=(sys.argv[0],), kwargs={{"run_name": "__main__"}}
    )
    wrapper.start()
    wrappers.append(wrapper)
for wrapper in wrappers:
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


def run_forked(directory: Path, *program: str, ranks: int = 1, preload: str = "") -> tuple[int, str]:
    """Return the exit code and the log of the last rank."""
    log = directory / f"rank-{ranks - 1:02d}.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-c", TORCHRUN.format(root=str(ROOT)), str(PROCESS_WRAPPER), "rank"]
    done = subprocess.run(
        [*command, str(directory), str(directory), "script", *program], cwd=directory, check=False,
        env={**os.environ, "RANKS": str(ranks), "PRELOAD": preload, "PYTHONPATH": f"{ROOT}:{directory}"},
    )  # fmt: skip
    return done.returncode, log.read_text()


def run_executed(directory: Path, *program: str) -> tuple[int, str]:
    """Return the exit code and the log of a rank that runs in its own Python, without a fork."""
    log = directory / "rank-00.log"
    log.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-S", str(PROCESS_WRAPPER), "rank", str(directory), str(directory),
         sys.executable, "-P", str(PROCESS_WRAPPER), "own", "script", *program],
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": str(directory)}, cwd=directory, check=False,
    )  # fmt: skip
    return done.returncode, log.read_text()


def run_plain(directory: Path, *program: str) -> tuple[int, str]:
    """The same of a Python that executes the program."""
    log = directory / "rank-00.log"
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-u", *program], cwd=directory, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env={**os.environ, "PYTHONPATH": str(directory)}, check=False,
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
@pytest.mark.parametrize("start", [run_forked, run_executed])
def test_script_finds_what_it_finds_elsewhere_and_ends_likewise(
    code: Path, program: tuple[str, ...], start: Callable[..., tuple[int, str]]
) -> None:
    path = program if program[0] == "-m" else (str(code / program[0]),)
    forked = start(code, *path, str(code / "rank-00.log"), "--flag")
    assert forked == run_plain(code, *path, str(code / "rank-00.log"), "--flag")
    assert forked[0] == 7
    first, record, *rest = forked[1].splitlines()
    assert first == "no line7"
    assert json.loads(record)["argv"][-1] == "--flag"
    assert rest == ["late", "at exit"]


# Pickles name the script's classes and functions by its module.
MULTIPROCESSING = """
import multiprocessing, subprocess, sys, threading, time
from dataclasses import dataclass

@dataclass
class Answer:
    process: str
    parent: str

def answer(_number=0):
    return Answer(multiprocessing.current_process().name, multiprocessing.parent_process().name)

def put(queue):
    queue.put(answer())

if __name__ == "__main__":
    print(repr(sys.stdin.read()), sys.stdin is sys.__stdin__, sys.stdin.fileno(), sys.stdout.mode)
    print(multiprocessing.get_start_method(allow_none=True), multiprocessing.active_children())
    print(threading.main_thread().native_id == threading.get_native_id(), sys.orig_argv[1:])
    for method in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method(method, force=True)
        with multiprocessing.Pool(1) as pool:
            print(method, pool.map(answer, [0]))
        queue = multiprocessing.SimpleQueue()
        process = multiprocessing.Process(target=put, args=[queue])
        process.start()
        print(queue.get())
        process.join()
        print(process.exitcode, process)
        process = multiprocessing.Process(target=time.sleep, args=[1000])
        process.start()
        process.terminate()
        process.join()
        print(process.exitcode < 0)
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.terminate()
    with multiprocessing.Manager() as manager:
        print(manager.list([1]))
"""


@pytest.mark.parametrize("program", [("train.py",), ("-m", "package.train")])
def test_script_starts_processes_as_elsewhere(code: Path, program: tuple[str, ...]) -> None:
    for name in ("train.py", "package/train.py"):
        (code / name).write_text(MULTIPROCESSING)
    path = program if program[0] == "-m" else (str(code / program[0]),)
    forked, plain = (
        (exit_code, re.sub(r"(pid|parent)=\d+", "", log))
        for exit_code, log in (run_forked(code, *path), run_plain(code, *path))
    )
    assert plain[0] == 0, plain[1]
    assert forked == plain


ENDS = ["", "sys.exit()", "sys.exit(3)", "sys.exit('no data')", "def f(): raise ValueError('no luck')\nf()", "1 +"]


@pytest.mark.parametrize("end", ENDS)
def test_script_ends_as_elsewhere(code: Path, end: str) -> None:
    (code / "train.py").write_text(f"import sys\n{end}\n")
    assert run_forked(code, str(code / "train.py")) == run_plain(code, str(code / "train.py"))


@pytest.mark.slow
def test_ranks_draw_different_random_numbers(code: Path) -> None:
    """torch's generator is seeded before torchrun forks the ranks."""
    numbers = "random.random(), numpy.random.rand(), torch.rand(1).item()"
    (code / "train.py").write_text(f"import random, numpy, torch\nprint({numbers})\n")
    run_forked(code, str(code / "train.py"), ranks=2, preload="torch")
    draws = [(code / f"rank-{rank:02d}.log").read_text().split() for rank in range(2)]
    assert all(first != second for first, second in zip(*draws, strict=True)), draws


# Without the thresholds, glibc maps the first buffer, and takes new pages for the second one.
BUFFERS = """
import resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill():
    return len(b"x" * (20 * 2**20))

fill()
before = faults()
fill()
print(faults() - before)
"""


def test_freed_memory_is_kept_for_the_next_step(code: Path) -> None:
    (code / "train.py").write_text(BUFFERS)
    [pages] = run_forked(code, str(code / "train.py"))[1].split()
    assert int(pages) < 1000, "20 MB are 5,120 pages"


def test_what_a_script_imports_is_imported_before_the_ranks_fork() -> None:
    source = b"""
import os, torch.utils.data as data
import pandas
from torchvision.transforms import v2
from torch.utils import cpp_extension
from torch.utils.benchmark import Timer
import torch.testing._internal.common_utils
from . import helpers
def main():
    os.environ["A"] = "b"
if __name__ == "__main__":
    os.environ["C"] = "d"
"""
    found = TopLevel.parse(source)
    expected = ["torch.utils.data", "torchvision.transforms", "torchvision.transforms.v2", "torch.utils"]
    assert list(found.imports) == expected, "modules that query GPUs when they are imported are left out"
    assert not found.prepares_imports


@pytest.mark.parametrize(
    "line", ["os.environ['OMP_NUM_THREADS'] = '4'", "os.putenv('A', 'b')", "environ.update(a='b')"]
)
def test_script_that_prepares_its_imports_runs_in_a_python_of_its_own(line: str) -> None:
    assert TopLevel.parse(f"import os\n{line}\nimport torch\n".encode()).prepares_imports
    assert not TopLevel.parse(f"import os, torch\n{line}\n".encode()).prepares_imports


# Its loader's worker is a fork, which steps, too.
STEPS = """
import os, signal, torch
from torch.utils.data import DataLoader, StackDataset

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(StackDataset(torch.arange(7.0)), num_workers=1, worker_init_fn=lambda _: optimizer.step()):
    optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("run", [run_forked, run_executed])
def test_steps_are_counted_until_the_rank_is_killed(code: Path, run: Callable[..., tuple[int, str]]) -> None:
    (code / "train.py").write_text(STEPS)
    exit_code, log = run(code, "train.py")
    assert exit_code % 256 == -signal.SIGKILL % 256, log  # of the rank, or of the process that has forked it
    [failure] = [json.loads(path.read_bytes()) for path in NodeDir(code).exits.glob("[0-9]*.json")]
    assert failure["counted_steps"] == 7
    assert failure["step"] is None, "it would decide whether the same failure has repeated"
