"""Slurm's signals reach every process of a rank: its workers and services live on until somebody else ends them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import ROOT

from hpc.run.nodedir import NodeDir
from jobs.ranks.torchrun import PROCESS_WRAPPER

# As torchrun does it with --run-path: it has imported torch, its fork becomes a wrapper, which forks the rank.
TORCHRUN = "import runpy, sys, torch; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run_rank(directory: Path, script: str, *words: str, own: bool = False) -> list[str]:
    """Run a script as a rank, in a fork of its wrapper or in a Python of its own. Returns what it prints."""
    for part in NodeDir(directory).directories:
        part.mkdir(parents=True, exist_ok=True)
    (directory / "script.py").write_text(script)
    wrapper = [str(PROCESS_WRAPPER), "rank", str(directory), str(directory)]
    if own:
        wrapper += [sys.executable, "-P", str(PROCESS_WRAPPER), "own"]
    torchrun = [sys.executable, "-P", "-c", TORCHRUN, *wrapper, "script", str(directory / "script.py"), *words]
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-S", str(PROCESS_WRAPPER), "torchrun", *torchrun], cwd=directory, check=False,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": path},
    )  # fmt: skip
    log = (directory / "rank-00.log").read_text()
    assert done.returncode == 0, log
    return log.splitlines()


# Before the rank handles the signals, it ignores them. Workers that are not forked import torch, so there are fewer.
LOADERS = """
import multiprocessing, os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from support.step_signals import send_to_step

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

class Map(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return index

class Iterable(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        yield from range(worker.id, 64, worker.num_workers)

def read(kind, method, **more):
    loader = DataLoader(kind(), batch_size=4, num_workers=2, multiprocessing_context=method, **more)
    for number in SIGNALS[:1 + len(more)]:
        indices = []
        for place, batch in enumerate(loader):
            indices += batch.tolist()
            if place == 1:
                send_to_step(number, os.getppid())
            if place == 9:
                [send_to_step(number, os.getppid()) for number in SIGNALS]
        assert sorted(indices) == list(range(64)), indices
    print("read", kind.__name__)

if __name__ == "__main__":
    method, *strategies = sys.argv[1:]
    for strategy in strategies:
        torch.multiprocessing.set_sharing_strategy(strategy)
        shared = torch.ones(1).share_memory_()
    multiprocessing.set_forkserver_preload(["torch"])
    if method != "spawn":
        read(Map, method)
        read(Iterable, method)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: print("handled", number))
    read(Map, method, persistent_workers=True)
    if method == "fork":
        read(Iterable, method)
"""


@pytest.mark.parametrize(
    ("words", "own"),
    [
        pytest.param(("fork",), True, id="fork in a Python of its own"),
        # With this strategy, the first process that shares a tensor starts one that owns the shared files.
        pytest.param(("fork", "file_system"), False, id="fork"),
        pytest.param(("spawn",), False, id="spawn"),
        pytest.param(("forkserver",), False, id="forkserver"),
    ],
)
def test_loader_workers_read_all_data(tmp_path: Path, words: tuple[str, ...], own: bool) -> None:
    printed = run_rank(tmp_path, LOADERS, *words, own=own)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        assert f"handled {number.value}" in printed, "the rank itself hears the signals"


LEFT_WORKERS = """
import torch
from torch.utils.data import DataLoader
loader = DataLoader(range(100), num_workers=12, persistent_workers=True)
first = next(batches := iter(loader))
print("the script has ended")
"""


def test_loader_workers_that_the_script_leaves_end_in_silence(tmp_path: Path) -> None:
    assert run_rank(tmp_path, LEFT_WORKERS)[-1] == "the script has ended"


# Each helper process answers a line. None of these imports torch.
HELPERS = """
import concurrent.futures, multiprocessing, os, signal, subprocess, sys
from support.step_signals import processes_below, send_to_step

ECHO = "import sys; [print(line, end='', flush=True) for line in sys.stdin]"

def serve(pipe):
    while True:
        pipe.send(pipe.recv())

def started(command, **more):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)

def asks(process):
    def ask(word):
        process.stdin.write(f"{word}\\n")
        process.stdin.flush()
        return process.stdout.readline().strip()
    return ask

def forked():
    (read, answer), (question, write) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        while True:
            os.write(answer, os.read(question, 100))
    def ask(word):
        os.write(write, word.encode())
        return os.read(read, 100).decode()
    return pid, ask

def all_helpers():
    "Yield what ends a helper process, what waits for its end, and what asks it."
    python = [sys.executable, "-c", ECHO]
    for command, more in (
        (python, {}), (python, {"start_new_session": True}), (["/bin/cat"], {"close_fds": False}),
        (["bash", "-c", "cat; exit"], {}),
    ):
        process = started(command, **more)
        yield process.terminate, process.wait, asks(process)
    group = started(["bash", "-c", "cat; exit"], start_new_session=True)
    yield (lambda: os.killpg(group.pid, signal.SIGTERM)), group.wait, asks(group)
    for method in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context(method)
        near, far = context.Pipe()
        process = context.Process(target=serve, args=[far])
        process.start()
        yield process.terminate, process.join, (lambda word, near=near: (near.send(word), near.recv())[1])
        pool = context.Pool(1)
        yield pool.terminate, pool.join, (lambda word, pool=pool: pool.apply(str, [word]))
        executor = concurrent.futures.ProcessPoolExecutor(1, context)
        yield executor.shutdown, (lambda: None), (lambda word, executor=executor: executor.submit(str, word).result())
        manager = context.Manager()
        names = manager.dict()
        yield manager.shutdown, (lambda: None), (lambda word, names=names: (names.update(a=word), names["a"])[1])
    pid, ask = forked()
    yield (lambda: os.kill(pid, signal.SIGTERM)), (lambda: os.waitpid(pid, 0)), ask

def main():
    if sys.argv[1] == "handled":
        signal.signal(signal.SIGTERM, lambda *_: None)
    helpers = list(all_helpers())
    assert [ask("before") for _, _, ask in helpers] == ["before"] * len(helpers)
    for number in (signal.SIGTERM, signal.SIGUSR2) * 2:
        send_to_step(number, os.getppid())
    assert [ask("after") for _, _, ask in helpers] == ["after"] * len(helpers)
    for end, wait, _ in helpers:
        end()
        wait()
    left = [open(f"/proc/{pid}/cmdline").read() for pid in processes_below(os.getpid())]
    print("left", [line for line in left if "resource_tracker" not in line and "forkserver" not in line])

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("handled", ["handled", "ignored"])
def test_helper_processes_outlive_signals_and_end_when_they_are_told_to(tmp_path: Path, handled: str) -> None:
    assert run_rank(tmp_path, HELPERS, handled)[-1] == "left []"


# A program with a pool of its own, `timeout`, and a shell: none of them sends SIGTERM through the rank.
OTHERS = """
import signal, subprocess, sys
if sys.argv[1] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: None)
POOL = "import multiprocessing\\nwith multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1]))"
subprocess.run([sys.executable, "-c", POOL], check=True)
subprocess.run(["timeout", "0.1", "sleep", "1000"], check=False)
sleeping = subprocess.Popen(["sleep", "1000"])
subprocess.run(["bash", "-c", f"kill {sleeping.pid}"], check=True)
sleeping.wait()
print("all have ended")
"""


# The kernel cuts a name to 15 bytes. The wrapper looks at its helper processes every second.
CUT_NAME = """
import subprocess, time
helper = subprocess.Popen(["./ééééééééé", "2.5"])
time.sleep(1.2)
helper.terminate()
helper.wait()
helper = subprocess.Popen(["./ééééééééé", "1000"])
print("the helper process has ended")
"""


def test_name_of_a_helper_process_may_be_cut_within_a_character(tmp_path: Path) -> None:
    (tmp_path / "ééééééééé").symlink_to("/bin/sleep")
    assert run_rank(tmp_path, CUT_NAME)[-1] == "the helper process has ended"


@pytest.mark.parametrize("handled", ["handled", "ignored"])
def test_helper_processes_end_when_others_tell_them_to(tmp_path: Path, handled: str) -> None:
    assert run_rank(tmp_path, OTHERS, handled)[-1] == "all have ended"
