"""One run, many random failures or stops that do not wait for it to recover: it has the bits of an undisturbed one.

A few in every test run; by hand as many as one likes, and others with another seed:

    TORCHRELAY_STRESS=30 TORCHRELAY_STRESS_SEED=7 .venv/bin/pytest tests/runs/test_stress.py -s
"""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
from support.cluster import (
    SLOW_STEPS,
    SMALL_BATCH,
    TIMEOUT_SECONDS,
    TWO_NODES,
    TWO_RANKS_HERE,
    Run,
    Site,
    agent_pids,
    assert_ended_as,
    assert_nothing_left,
    parent,
    rank_pids,
)

from hpc.run.events.history import History

FAILURES = int(os.environ.get("TORCHRELAY_STRESS", "2"))
SEED = int(os.environ.get("TORCHRELAY_STRESS_SEED", "4"))
PAUSE_SECONDS = 2.0, 20.0
# The share of failures that come within a second of the one before.
SHARE_OF_PAIRS = 0.25
# Of 30 steps, each of which is slow: they take as long as the longest pause, on any machine.
EPOCHS_PER_FAILURE = 2
STOPS = ("term", "preempt", "no_requeue")
KINDS = ("worker", "worker", "wrapper", "wrapper", "hang", "agent", "node", "head", "term", "preempt")
TRAINING = (
    "--data=data", *TWO_NODES, *SMALL_BATCH, "--lr=0.01", "--lr-scheduler=constant",
    f"--epochs={EPOCHS_PER_FAILURE * FAILURES}", "--log-every=1",
)  # fmt: skip
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600 + 120 * FAILURES)]


class Chaos:
    """Breaks a run."""

    def __init__(self, run: Run, seed: int, kinds: tuple[str, ...]) -> None:
        self.run, self.random, self.kinds = run, random.Random(seed), kinds
        self.dead: list[str] = []

    def strike(self) -> str:
        """Break something, whatever the run is doing. Returns what; empty if it was not there."""
        history = History.load(self.run.directory)
        attempts = history.attempts
        nodes = [node for node in attempts[-1].nodes if node not in self.dead] if attempts else []
        kind = self.random.choice(self.kinds)
        return f"{kind} of {' '.join(nodes)}" if nodes and getattr(self, kind)(nodes, history.last_job_id) else ""

    def send(self, number: int, pids: list[int]) -> bool:
        """Signal one of some processes. Returns whether there was one."""
        with suppress(ProcessLookupError, FileNotFoundError):
            if pids:
                os.kill(self.random.choice(pids), number)
                return True
        return False

    def ranks(self, nodes: list[str]) -> list[int]:
        return [pid for node in nodes for pid in rank_pids(self.run, node)]

    def worker(self, nodes: list[str], _job_id: str) -> bool:
        return self.send(signal.SIGKILL, self.ranks(nodes))

    def wrapper(self, nodes: list[str], _job_id: str) -> bool:
        with suppress(FileNotFoundError):
            return self.send(signal.SIGKILL, [parent(pid) for pid in self.ranks(nodes)])
        return False

    def hang(self, nodes: list[str], _job_id: str) -> bool:
        return self.send(signal.SIGSTOP, self.ranks(nodes))

    def agent(self, nodes: list[str], _job_id: str) -> bool:
        return self.send(signal.SIGKILL, [pid for node in nodes for pid in agent_pids(self.run, node)])

    def node(self, nodes: list[str], _job_id: str) -> bool:
        return self.kill(self.random.choice(nodes[1:] or nodes))

    def head(self, nodes: list[str], _job_id: str) -> bool:
        return self.kill(nodes[0])

    def kill(self, node: str) -> bool:
        # One dead node at a time: of the four, a job needs two and a spare.
        self.revive()
        assert self.run.site.hpc("testbed", "kill-node", node).returncode == 0
        self.dead.append(node)
        return True

    def revive(self) -> None:
        while self.dead:
            assert self.run.site.hpc("testbed", "revive-node", self.dead.pop()).returncode == 0

    def term(self, _nodes: list[str], job_id: str) -> bool:
        return self.run.site.type("scancel", "--signal=TERM", f"{job_id}.0").returncode == 0

    def no_requeue(self, _nodes: list[str], job_id: str) -> bool:
        """From now on, Slurm refuses to requeue this job."""
        return self.run.site.type("scontrol", "update", f"JobId={job_id}", "Requeue=0").returncode == 0

    def preempt(self, nodes: list[str], _job_id: str) -> bool:
        command = ["sbatch", "--partition=urgent", "--exclusive", f"--nodelist={nodes[0]}", "--output=/dev/null"]
        self.run.site.slurm(*command, "--wrap=true")
        return True


def break_it(chaos: Chaos, pause_seconds: tuple[float, float]) -> int:
    """Cause the failures, one after the other, without a look at how the run takes them. Returns how many."""
    done, deadline = 0, time.monotonic() + TIMEOUT_SECONDS + 60 * FAILURES
    while done < FAILURES and not chaos.run.directory.final_result.exists():
        assert time.monotonic() < deadline, chaos.run.evidence()
        if what := chaos.strike():  # between two jobs there is nothing to break
            done += 1
            step = max(chaos.run.steps(), default=0)
            print(f"{time.strftime('%H:%M:%S')} failure {done}, after step {step}: {what}", flush=True)
        is_pair = bool(what) and chaos.random.random() < SHARE_OF_PAIRS
        time.sleep(chaos.random.uniform(0, 1) if is_pair else chaos.random.uniform(*pause_seconds))
    return done


def test_a_run_survives_whatever_happens_to_it(site: Site) -> None:
    undisturbed = site.submit(*TRAINING, *TWO_RANKS_HERE, "--name=undisturbed")
    run = site.submit(*TRAINING, "--spares=1", "--hang-timeout=8s", f"--name=stress-{SEED}", **SLOW_STEPS)
    chaos = Chaos(run, SEED, KINDS)
    with site.supervised():
        try:
            assert break_it(chaos, PAUSE_SECONDS) > FAILURES / 2, "the training ended before: raise EPOCHS_PER_FAILURE"
        finally:
            chaos.revive()
        run.wait("the end", lambda: run.status()["state"] in {"completed", "failed"}, seconds=600 + 30 * FAILURES)
    status = run.status()
    assert status["state"] == "completed", run.evidence()
    assert status["interruptions"], "nothing was noticed"
    assert_ended_as(run, undisturbed)
    # An agent that is killed cannot tidy up: the next run on its node does.
    site.submit("--data=data", "--nodes=4", *TWO_NODES[1:], "--epochs=1").wait_for_state("completed")
    assert_nothing_left(run)
    run.wait("the end of the jobs", lambda: not run.is_alive())
    for path in (site.path / "runs").rglob("*.lock"):
        pytest.fail(f"{path} is left")


def test_stops_lose_no_step_and_are_continued_once(site: Site) -> None:
    """A stop may come while the one before it is handled, or while the run starts."""
    training = ("--data=data", *TWO_NODES, f"--epochs={max(10, 2 * FAILURES)}", "--log-every=1")
    undisturbed = site.submit(*training, *TWO_RANKS_HERE, "--name=undisturbed")
    run = site.submit(*training, "--name=stopped", **SLOW_STEPS)
    assert break_it(Chaos(run, SEED, STOPS), (2.0, 8.0)) == FAILURES, "the training ended before: more epochs"
    run.wait("the end", lambda: run.status()["state"] in {"completed", "failed"}, seconds=900 + 20 * FAILURES)
    status = run.status()
    assert (status["state"], status["steps_lost"]) == ("completed", 0), run.evidence()
    assert all(end["cause"] in {"preempted", "requeued", "completed"} for end in status["attempts"])
    following = [one["job_id"] for one in (*run.events("resubmitted"), *run.events("requeued"))]
    started = [attempt["job_id"] for attempt in status["attempts"][1:]]
    assert not set(started) - {*following, status["attempts"][0]["job_id"]}, "a job that nobody has submitted"
    assert_ended_as(run, undisturbed)
    run.wait("the end of the jobs", lambda: not run.is_alive())
