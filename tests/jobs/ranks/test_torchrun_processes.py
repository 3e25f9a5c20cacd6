"""torchrun, its ranks and their wrappers, against real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ROOT, need
from support.staging_nodes import hanging
from support.waiting import wait_for

from hpc.base.environment import PARENT
from hpc.base.kernel import children, process_state, steady_time
from hpc.run.nodedir import NodeDir
from jobs.control.channel import AgentClock
from jobs.control.messages import RankStart
from jobs.ranks.monitor import LocalRanks
from jobs.ranks.torchrun import PROCESS_WRAPPER, Torchrun, handles

# A pretended torchrun: its child, a wrapper, has a child, the rank.
NESTED = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}], start_new_session={new}))"


def start(rank: str) -> Torchrun:
    wrapper = NESTED.format(code=rank, new=False)
    return Torchrun([sys.executable, "-c", NESTED.format(code=wrapper, new=True)], os.environ, Path("/"))


HANDLES_LATE = """
import os, signal, time
while not os.path.exists({!r}):
    time.sleep(0.01)
signal.signal(signal.SIGUSR2, lambda *_: exit(4))
time.sleep(300)
"""


def test_signal_is_forwarded_only_to_ranks_that_handle_it(tmp_path: Path) -> None:
    with start(HANDLES_LATE.format(str(tmp_path / "begin"))) as torchrun:
        wait_for(torchrun.ranks)
        [rank] = torchrun.ranks()
        assert not handles(rank, signal.SIGUSR2)
        torchrun.forward([signal.SIGTERM, signal.SIGUSR2])
        assert torchrun.exit_code is None
        (tmp_path / "begin").touch()
        wait_for(lambda: handles(rank, signal.SIGUSR2))
        torchrun.forward([signal.SIGTERM, signal.SIGUSR2])
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == 4
    assert not handles(rank, signal.SIGUSR2), "a process that has ended handles nothing"


def test_signals_to_all_processes_do_not_end_torchrun_which_ends_as_its_ranks() -> None:
    with start("import os, signal; [os.kill(0, n) for n in (signal.SIGTERM, signal.SIGUSR2)]; exit(5)") as torchrun:
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == 5


WAITING = "import time; time.sleep(300)"


def test_nothing_outlives_a_killed_agent() -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from jobs.ranks.torchrun import Torchrun\n"
        f"wrapper = [sys.executable, '-c', {NESTED.format(code=WAITING, new=True)!r}]\n"
        "with Torchrun(wrapper, os.environ, Path('/')): time.sleep(300)"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for(lambda: children(agent.pid) and children(children(agent.pid)[0]))
    [torchrun] = children(agent.pid)
    agent.kill()
    agent.wait()
    wait_for(lambda: process_state(torchrun) in {None, "Z"})
    assert not children(torchrun)


def test_aborted_rank_prints_its_stacks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write = f"import os, time; os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2); os.write(2, b'1')"
    code = f"{write}; time.sleep(300)"
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    nested = NESTED.format(code=NESTED.format(code=code, new=False), new=True)
    with Torchrun([sys.executable, "-c", nested], environment, Path("/")) as torchrun:
        wait_for(lambda: torchrun.ranks() and log.exists() and log.read_text())
        torchrun.abort_ranks()
        wait_for(lambda: torchrun.exit_code is not None)
    assert "Fatal Python error: Aborted" in log.read_text()


def test_rank_that_hangs_in_the_fork_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wrapper that has no session yet is killed; one that has a session may take longer."""
    monkeypatch.setattr("jobs.ranks.torchrun._FORK_SECONDS", 0.5)
    stuck, begun = (NESTED.format(code=WAITING, new=new) for new in (False, True))
    with (
        Torchrun([sys.executable, "-c", stuck], os.environ, Path("/")) as hung,
        Torchrun([sys.executable, "-c", begun], os.environ, Path("/")) as well,
    ):
        wait_for(lambda: (well.kill_stuck_forks(), hung.kill_stuck_forks(), hung.exit_code is not None)[-1])
        assert hung.exit_code != 0
        assert well.exit_code is None


@pytest.fixture
def memory(tmp_path: Path) -> NodeDir:
    found = NodeDir(tmp_path)
    for directory in found.directories:
        directory.mkdir(exist_ok=True)
    return found


@pytest.fixture
def ranks(memory: NodeDir) -> LocalRanks:
    return LocalRanks(memory, 2, "gpu01", AgentClock())


def test_what_an_earlier_attempt_left_is_no_failure(tmp_path: Path, memory: NodeDir) -> None:
    """Its agent and its wrappers were killed together."""
    code = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    assert wrap(tmp_path, sys.executable, "-c", code) == -signal.SIGKILL
    assert list(memory.running_ranks())
    assert LocalRanks(memory, 2, "gpu01", AgentClock()).new_failures() == []


WRAPPER = [sys.executable, "-S", str(PROCESS_WRAPPER), "rank"]


def wrap(directory: Path, *program: str, rank: int = 5) -> int:
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": "1"}
    command = [*WRAPPER, str(directory), str(directory), *program]
    return subprocess.run(command, env=environment, check=False).returncode


def test_wrapper_ends_as_its_rank_and_records_why(tmp_path: Path, ranks: LocalRanks) -> None:
    assert wrap(tmp_path, sys.executable, "-c", "print('fine')") == 0
    assert ranks.new_failures() == []
    assert ranks.starts() == (RankStart(rank=5, restarts=0, has_ended=True),)
    assert wrap(tmp_path, sys.executable, "-c", "raise ValueError('no luck')") == 1
    assert wrap(tmp_path, sys.executable, "-c", "import os; os.abort()") == -signal.SIGABRT
    assert wrap(tmp_path, "no-such-program") == 127
    raised, aborted, missing = ranks.new_failures()
    assert (raised.rank, raised.exit_code, raised.signal, raised.detail) == (5, 1, None, "ValueError: no luck")
    assert (aborted.exit_code, aborted.signal, aborted.detail) == (-6, "SIGABRT", ""), (
        "an older last line is not its own"
    )
    assert missing.detail.startswith("no-such-program cannot be started")
    assert [failure.cause for failure in (raised, aborted, missing)] == ["crashed"] * 3
    assert raised.started_at <= raised.failed_at <= aborted.started_at
    assert "fine" in (tmp_path / "rank-05.log").read_text()


@pytest.mark.parametrize("form", ["torchrun", "container", "rank"])
def test_wrapper_whose_parent_has_ended_before_it_could_ask_for_a_signal_starts_nothing(
    tmp_path: Path, ranks: LocalRanks, form: str
) -> None:
    """The kernel sends the signal only if the parent ends later."""
    directories = [str(tmp_path)] * 2 if form == "rank" else []
    command = [sys.executable, "-S", str(PROCESS_WRAPPER), form, *directories, "touch", str(tmp_path / "started")]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", PARENT: "0"}
    assert subprocess.run(command, env=environment, check=False).returncode == 1
    assert not (tmp_path / "started").exists()
    assert ranks.new_failures() == []


# As torchrun does it with --run-path; a connection is open meanwhile.
FORK = """
import os, runpy, socket, sys
connection = socket.socket()
sys.argv = sys.argv[1:]
if (wrapper := os.fork()) == 0:
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(wrapper, 0)[1])
sys.exit(status if status >= 0 else 128 - status)
"""


def fork(directory: Path, code: str) -> subprocess.Popen[bytes]:
    """Start a process that forks a wrapper, which forks a rank, which runs a module with this code."""
    (directory / "program.py").write_text(code)
    rank = [str(PROCESS_WRAPPER), "rank", str(directory), str(directory), "-m", "program", "--flag"]
    environment = {**os.environ, "RANK": "5", "LOCAL_RANK": "1", "PYTHONPATH": str(directory)}
    return subprocess.Popen([sys.executable, "-c", FORK, *rank], env=environment)


def test_forked_rank_is_as_one_that_is_executed(tmp_path: Path, ranks: LocalRanks) -> None:
    code = """
import json, os, sys
record = {"argv": sys.argv[1:], "name": __name__, "open": len(os.listdir("/proc/self/fd")),
          "leader": os.getsid(0) == os.getppid(), "comm": open("/proc/self/comm").read()}
print(json.dumps(record), flush=True)
"""
    assert fork(tmp_path, code + "os._exit(0)").wait() == 0
    assert ranks.new_failures() == []
    # The fourth of the descriptors lists them.
    expected = {"argv": ["--flag"], "name": "__main__", "open": 4, "leader": True, "comm": "rank-5\n"}
    assert json.loads((tmp_path / "rank-05.log").read_text()) == expected
    assert fork(tmp_path, "raise ValueError('no luck')").wait() == 1
    assert fork(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait() == 128 + signal.SIGKILL
    raised, killed = ranks.new_failures()
    assert (raised.rank, raised.exit_code, raised.detail) == (5, 1, "ValueError: no luck")
    assert (killed.rank, killed.signal) == (5, "SIGKILL")


# Runs a command in a mount namespace with a GPU's device file.
GPU = """
mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mkdir /dev/shm && touch /dev/nvidiactl && exec "$@" 7<$FILE
"""


@pytest.mark.parametrize("file", ["/dev/nvidiactl", "/dev/null"])
def test_rank_whose_parent_has_opened_a_gpu_starts_by_itself(tmp_path: Path, ranks: LocalRanks, file: str) -> None:
    """torch's own flag misses some ways to use a GPU's driver, but the driver's files are open then."""
    need("unshare")
    (tmp_path / "program.py").write_text("import sys\nprint(sys.orig_argv[-3:], sys.argv)\nsys.exit()\n")
    rank = [str(PROCESS_WRAPPER), "rank", str(tmp_path), str(tmp_path), "-m", "program", "--flag"]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": str(tmp_path), "FILE": file}
    namespace = ["unshare", "--mount", "sh", "-c", GPU, "sh"]
    subprocess.run([*namespace, sys.executable, "-c", FORK, *rank], env=environment, check=True)
    log = (tmp_path / "rank-00.log").read_text()
    is_gpu = file != "/dev/null"
    reason = f"{file} was open before the ranks were forked"
    assert log.startswith(f"this rank imports torch itself, which takes longer: {reason}\n") == is_gpu
    arguments = [str(tmp_path / "program.py"), "--flag"]
    assert log.endswith(f"['-m', 'program', '--flag'] {arguments}\n"), "its program and arguments stay"
    assert ranks.new_failures() == []


def test_wrapper_without_a_log_of_its_own(tmp_path: Path, ranks: LocalRanks) -> None:
    wrapper = [*WRAPPER, str(tmp_path / "gone"), str(tmp_path)]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0"}
    command = [*wrapper, sys.executable, "-c", "print('heard', flush=True); 1 / 0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot be written" in done.stdout
    assert "heard" in done.stdout
    [failure] = ranks.new_failures()
    assert "rank-00.log cannot be read" in failure.detail


@pytest.mark.parametrize("output", ["/dev/null", "/dev/full"])
def test_failure_that_cannot_be_recorded_ends_torchrun(tmp_path: Path, output: str) -> None:
    """Also if a full disk does not take what the wrapper says of it."""
    wrapper = [*WRAPPER, str(tmp_path / "gone"), str(tmp_path / "gone"), "false"]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0"}
    torchrun = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *wrapper]
    with Path(output).open("w") as full:
        assert subprocess.run(torchrun, env=environment, check=False, stdout=full).returncode == -signal.SIGKILL


@pytest.fixture
def wrapper(tmp_path: Path, memory: NodeDir) -> Iterator["subprocess.Popen[bytes]"]:
    """The wrapper of rank 3, which waits."""
    assert not list(memory.running_ranks())
    environment = {**os.environ, "RANK": "3", "LOCAL_RANK": "0"}
    command = [*WRAPPER, str(tmp_path), str(tmp_path), sys.executable, "-c", WAITING]
    with subprocess.Popen(command, env=environment, start_new_session=True) as started:
        wait_for(lambda: children(started.pid))
        yield started
        started.kill()


def test_rank_whose_wrapper_was_killed_is_reported_with_the_time(
    ranks: LocalRanks, wrapper: "subprocess.Popen[bytes]"
) -> None:
    assert ranks.new_failures() == []
    seen = steady_time()
    wrapper.kill()
    wait_for(lambda: process_state(wrapper.pid) == "Z")
    [failure] = ranks.new_failures()
    assert (failure.rank, failure.signal, failure.cause) == (3, "SIGKILL", "crashed")
    assert "wrapper" in failure.detail
    assert failure.started_at <= failure.failed_at <= seen, "when it was last seen alive"
    assert ranks.new_failures() == [], "once"


def test_rank_that_torchrun_ends_has_not_failed(
    memory: NodeDir, ranks: LocalRanks, wrapper: "subprocess.Popen[bytes]"
) -> None:
    """As it ends the others when one has failed: SIGTERM to the session, and SIGKILL if that does not help."""
    [rank] = children(wrapper.pid)
    wait_for(lambda: handles(wrapper.pid, signal.SIGTERM))
    os.killpg(wrapper.pid, signal.SIGTERM)
    wait_for(lambda: not list(memory.running_ranks()))
    assert process_state(rank) not in {None, "Z"}, "it ignores SIGTERM until it has a handler"
    os.killpg(wrapper.pid, signal.SIGKILL)
    wait_for(lambda: process_state(wrapper.pid) == "Z")
    assert ranks.new_failures() == []


def test_rank_that_the_agent_ends_has_not_failed(ranks: LocalRanks, wrapper: "subprocess.Popen[bytes]") -> None:
    wrapper.kill()
    wait_for(lambda: process_state(wrapper.pid) == "Z")
    ranks.end()
    assert ranks.new_failures() == []


def test_heartbeats_of_living_ranks_only(tmp_path: Path, ranks: LocalRanks) -> None:
    assert ranks.heartbeats() == ()
    beat: dict[str, Any] = {"rank": 5, "pid": os.getpid(), "step": 3, "phase": "step", "count": 1}
    NodeDir(tmp_path).heartbeat(1).write_text(json.dumps(beat).ljust(512))
    NodeDir(tmp_path).heartbeat(0).write_text(json.dumps({**beat, "pid": 2**22 + 1}))
    [seen] = ranks.heartbeats()
    assert (seen.rank, seen.step, seen.phase) == (5, 3, "step")
    wait_for(lambda: ranks.heartbeats()[0].still_seconds > 0.0)

    def seen_at_once() -> bool:
        beat["count"] += 1
        NodeDir(tmp_path).heartbeat(1).write_text(json.dumps(beat))
        return ranks.heartbeats()[0].still_seconds == 0.0

    # A clock that ticks meanwhile may round up.
    wait_for(seen_at_once)
    ranks.begin(2, {})
    assert ranks.heartbeats() == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": None}, {"step": "12"}, {"step": True}, {"step": -1}, {"rank": [1]}, {"pid": "7"},
        {"pid": 10**30}, {"phase": {}}, {"step_seconds": "0.1"}, {"busy_seconds": -1},
    ],
)  # fmt: skip
def test_heartbeat_that_is_none_is_mentioned_once_and_not_used(
    wrong: dict[str, object], tmp_path: Path, ranks: LocalRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    beat = {"rank": 5, "pid": os.getpid(), "step": 3, "phase": "step", "step_seconds": 1, "count": 1}
    NodeDir(tmp_path).heartbeat(0).write_text(json.dumps(beat))
    NodeDir(tmp_path).heartbeat(1).write_text(json.dumps({**beat, **wrong}))
    for _ in range(2):
        assert [seen.rank for seen in ranks.heartbeats()] == [5]
    assert capsys.readouterr().out.count("the heartbeat of local rank 1 is not used: ") == 1


def test_failure_of_a_rank_whose_heartbeat_has_no_step(tmp_path: Path, ranks: LocalRanks) -> None:
    code = (
        "import json, os; json.dump({'pid': os.getpid(), 'step': '12'}, open(os.environ['TORCHRELAY_HEARTBEAT'], 'w'))"
    )
    assert wrap(tmp_path, sys.executable, "-c", f"{code}; exit(1)") == 1
    [failure] = ranks.new_failures()
    assert failure.step is None


def test_rank_that_waits_for_storage_that_hangs_cannot_be_killed(tmp_path: Path, ranks: LocalRanks) -> None:
    need("umount")
    (tmp_path / "storage").mkdir()
    with hanging(tmp_path / "storage"), subprocess.Popen(["cat", tmp_path / "storage" / "image"]) as rank:
        beat = {"rank": 5, "pid": rank.pid, "step": 3, "phase": "step", "count": 1}
        NodeDir(tmp_path).heartbeat(0).write_text(json.dumps(beat))
        wait_for(lambda: ranks.heartbeats()[0].state == "D")
        rank.kill()
