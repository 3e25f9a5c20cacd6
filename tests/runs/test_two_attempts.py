"""A suspended machine that resumes while the next attempt trains publishes nothing more."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from support.cluster import ROOT, SMALL_BATCH, Run, commands, need, ranks_of, site_without_slurm
from torchrelay.checkpoint_files import STATE_VALUES, list_checkpoints

from hpc.base.kernel import children, is_alive, start_time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FLAGS = ("--cluster=local", "--data=data", "--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", *SMALL_BATCH)
ENDLESS_HERE = ("--epochs=100000", "--log-every=1", "--checkpoint-every=5", "--val-split=0.2")
# Has its own /dev/shm, as another node would. submitit's controller starts the agents.
OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
ELSEWHERE = ("unshare", "--mount", "sh", "-c", OWN_MEMORY, "sh", sys.executable, "-m", "hpc.slurm.executor")


def start_elsewhere(run: Run) -> None:
    """Start the run's next attempt."""
    log = run.directory.logs / "elsewhere.log"
    with log.open("wb") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [*ELSEWHERE, str(run.directory.path)]
        subprocess.run(command, cwd=run.site.path, env=environment, stdout=output, stderr=output, check=True)


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Suspend processes, and kill them at the end."""
    send(signal.SIGSTOP, pids)
    try:
        yield
    finally:
        send(signal.SIGKILL, pids)


@pytest.fixture
def run() -> Iterator[Run]:
    """A run that never ends; it does not know the controller of its second attempt as its job."""
    need("unshare", "mount")
    with site_without_slurm() as site:
        run = site.submit(*FLAGS, *ENDLESS_HERE)
        yield run
        site.hpc("cancel", str(run.directory.path))
        path, own = str(run.directory.path).encode(), os.getpid()

        def left() -> list[int]:
            return [int(at.name) for at, words in commands() if path in b" ".join(words) and int(at.name) != own]

        run.wait("the end", lambda: not any(left()))


def test_ranks_that_thaw_while_the_next_attempt_trains_publish_nothing(run: Run) -> None:
    run.wait_for_steps(20)
    [rank], controller = ranks_of(run), int(run.job_id)
    # The agents resume last: they would end the attempt within seconds once they see its successor.
    agents, everything = [controller, *children(controller)], family(controller)
    started = {pid: start_time(pid) for pid in everything}
    with frozen(everything):
        start_elsewhere(run)
        run.wait("the second attempt", lambda: run.attempts_logged() == [1, 2])
        send(signal.SIGCONT, [pid for pid in everything if pid not in agents])
        run.wait("the end of the first attempt's rank", lambda: not is_alive(rank, started[rank]))
        done = len(run.steps())
        run.wait("more steps", lambda: len(run.steps()) > done + 20)
        send(signal.SIGCONT, agents)
        run.wait("the end of its agents", lambda: not any(is_alive(pid, started[pid]) for pid in agents))
    assert run.attempts_logged() == [1, 2]
    run.assert_no_gap()
    for checkpoint in list_checkpoints(run.directory.checkpoints):
        assert json.loads((checkpoint / STATE_VALUES).read_text())["attempt"] == 2
    assert "has begun: attempt 1 writes nothing more" in run.directory.rank_log(1, 0).read_text()
    assert not run.events("interruption")
