"""When ranks have ended, none of their processes exists, so that the next ranks find GPUs and ports free."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import ROOT, parent
from support.waiting import wait_for

from hpc.base.errors import BadNodeError
from hpc.base.kernel import process_state
from hpc.base.transport import pick_port
from hpc.run.nodedir import NodeDir
from jobs.ranks.rank_environment import torchrun_environment
from jobs.ranks.torchrun import PROCESS_WRAPPER, Rendezvous, Torchrun, torchrun_argv


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for each in NodeDir(tmp_path).directories:
        each.mkdir(exist_ok=True)
    return tmp_path


# The kernel takes a while to free a rank's memory. Meanwhile the main thread is a zombie and another thread exists.
LARGE = """
import os, sys, threading, time
memory = bytearray(500_000_000)
memory[::4096] = b"x" * len(memory[::4096])
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
time.sleep(1000)
"""
# Starts and ends ranks as torchrun does in a round; of the second one, the wrapper is killed.
ENDS = """
import os, signal, sys, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.run import run_script_path
from hpc.base.kernel import adopt_orphans
from training.runtime.compat import end_ranks_within
from training.runtime.__main__ import end_left_processes

program = sys.argv[1:]
if __name__ == "__main__":
    adopt_orphans()
    end_ranks_within(1, end_left_processes)
    specs, environment = DefaultLogsSpecs(), {"RANK": "0", "LOCAL_RANK": "0"}
    for is_wrapper_killed in (False, True):
        noted = Path(f"{program[-1]}-{is_wrapper_killed}")
        started = {0: [*program[:-1], str(noted)]}
        ranks = start_processes("t", run_script_path, started, {0: environment}, specs, start_method="fork")
        while not noted.exists() or not noted.read_text().endswith("\\n"):
            time.sleep(0.02)
        rank = noted.read_text().strip()
        if is_wrapper_killed:
            os.kill(ranks.pids()[0], signal.SIGKILL)
        ranks.close()
        tasks = Path("/proc", rank, "task")
        print("left:", [each.name for each in tasks.iterdir()] if tasks.exists() else [])
"""


@pytest.mark.slow
def test_torchrun_waits_for_ranks_not_for_their_wrappers_alone(node: Path) -> None:
    (node / "large.py").write_text(LARGE)
    (node / "ends.py").write_text(ENDS)
    wrapper = [str(PROCESS_WRAPPER), "rank", str(node), str(node)]
    program = [*wrapper, "script", str(node / "large.py"), str(node / "pid")]
    command = [sys.executable, str(node / "ends.py"), *program]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("left")] == ["left: []"] * 2, done.stdout


# Each start of the rank leaves processes behind in their own sessions; some are orphans. They keep a port that the next
# start needs.
LEAVES = """
import os, pathlib, signal, socket, subprocess, sys, time
here, start = pathlib.Path(sys.argv[1]), int(os.environ["TORCHRELAY_RESTARTS"])
older = [path for path in here.glob("left-*") if int(path.name.split("-")[1]) < start]
met = [path.name for path in older if os.path.exists(f"/proc/{path.read_text().strip()}")]
port = socket.create_server(("127.0.0.1", int(sys.argv[2])))
port.set_inheritable(True)
print(*met, file=open(here / f"met-{start}", "w"), flush=True)
for name, command in {
    "session": ["sh", "-c", "echo $$ > {}; exec sleep 1000"],
    "orphan": ["sh", "-c", "(sh -c 'echo $$ > {}; exec sleep 1000') & exit"],
    "stubborn": ["sh", "-c", "trap '' TERM; echo $$ > {}; exec sleep 1000"],
}.items():
    path = here / f"left-{start}-{name}"
    command = [word.replace("{}", str(path)) for word in command]
    subprocess.Popen(command, start_new_session=True, pass_fds=[port.fileno()])
    while not path.exists() or not path.read_text().strip():
        time.sleep(0.01)
if start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if start == 1:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
print("stays", file=open(here / "stays", "w"), flush=True)
while not (here / "end").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def left_behind(node: Path) -> Iterator[list[str]]:
    """The command line of torchrun for a rank that leaves processes behind, which end with the test."""
    (node / "leaves.py").write_text(LEAVES)
    wrapper = [str(PROCESS_WRAPPER), "rank", str(node), str(node)]
    program = [*wrapper, "script", str(node / "leaves.py"), str(node), str(pick_port())]
    yield torchrun_argv(alone(), 1, "127.0.0.1", sys.executable, program)
    for pid in pids_left(node):
        os.kill(pid, signal.SIGKILL)


def alone() -> Rendezvous:
    return Rendezvous(
        run="r", attempt=1, secret="s", round=1, num_nodes=1, host="localhost", port=pick_port(), node=0
    )  # fmt: skip


def pids_left(node: Path) -> list[int]:
    pids = [int(path.read_text()) for path in node.glob("left-*")]
    return [pid for pid in pids if process_state(pid) is not None]


def start(argv: list[str]) -> Torchrun:
    return Torchrun(argv, environment(), ROOT)


def environment() -> dict[str, str]:
    return torchrun_environment(alone(), dict(os.environ))


def test_what_a_rank_leaves_behind_ends_with_it(node: Path, left_behind: list[str]) -> None:
    """The rank is killed, then its wrapper is killed, then the rank ends by itself."""
    with start(left_behind) as torchrun:
        wait_for((node / "stays").exists)
        assert [(node / f"met-{number}").read_text() for number in range(3)] == ["\n"] * 3
        assert len(pids_left(node)) == 3, "only those of the rank that runs"
        assert len(torchrun.ranks()) == 1
        (node / "end").touch()
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == 0
        assert not pids_left(node)


@pytest.mark.slow
def test_what_a_rank_leaves_behind_ends_when_torchrun_is_killed(node: Path, left_behind: list[str]) -> None:
    with start(left_behind) as torchrun:
        wait_for((node / "stays").exists)
        [rank] = torchrun.ranks()
        os.kill(parent(parent(rank)), signal.SIGKILL)
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == -signal.SIGKILL
    assert not pids_left(node)


STAYS = """
import signal, subprocess
from hpc.base.kernel import end_children
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
print(end_children(seconds=0.3) == [child.pid], end_children())
"""


def test_process_that_stays_is_named() -> None:
    """The limit passes before SIGKILL, which a process can survive only while it waits in the kernel."""
    done = subprocess.run([sys.executable, "-c", STAYS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


def test_node_on_which_a_rank_stays_is_bad() -> None:
    torchrun = start(["sh", "-c", "exit 3"])
    wait_for(lambda: torchrun.exit_code is not None)
    with pytest.raises(BadNodeError, match="cannot be killed"):
        torchrun.kill()
