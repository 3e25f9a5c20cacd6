"""One run, many failures of random kinds at random moments: it completes, every step once, and leaves nothing behind.

In its short form a part of every test run; by hand, as long as one likes:

    TORCHRELAY_STRESS=30 .venv/bin/pytest tests/runs/test_stress.py -s
"""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
from cluster import Run, Site, agent_pids, assert_nothing_left, rank_pids

from hpc.core.kernel import process_state

FAILURES = int(os.environ.get("TORCHRELAY_STRESS", "3"))
SEED = int(os.environ.get("TORCHRELAY_STRESS_SEED", "4"))
# Of training, between two failures; with what it takes to recover, a failure takes ten times as long.
EPOCHS_PER_FAILURE = 10
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240 + 90 * FAILURES)]


class Chaos:
    """Breaks a run."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.dead: list[str] = []
        self.done: list[str] = []

    def nodes(self) -> list[str]:
        """The nodes of the newest attempt that live, the head first."""
        attempts = self.run.status()["attempts"]
        return [node for node in attempts[-1]["nodes"] if node not in self.dead] if attempts else []

    def strike(self) -> None:
        """Do something to it."""
        kind = self.random.choice(["worker", "worker", "hang", "agent", "node", "head", "term", "preempt"])
        if kind in {"node", "head"}:
            self.revive()  # one dead node at a time: the run needs two of the four, and so does its next job
        nodes = self.nodes()
        if not nodes:
            return
        getattr(self, kind)(nodes)
        self.done.append(kind)
        print(f"{time.strftime('%H:%M:%S')} {kind}: {' '.join(nodes)}", flush=True)

    def signal_one(self, pids: list[int], number: int) -> None:
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), number)

    def worker(self, nodes: list[str]) -> None:
        self.signal_one([pid for node in nodes for pid in rank_pids(self.run, node)], signal.SIGKILL)

    def hang(self, nodes: list[str]) -> None:
        self.signal_one([pid for node in nodes for pid in rank_pids(self.run, node)], signal.SIGSTOP)

    def agent(self, nodes: list[str]) -> None:
        self.signal_one(agent_pids(self.run, self.random.choice(nodes)), signal.SIGKILL)

    def node(self, nodes: list[str]) -> None:
        self.kill(self.random.choice(nodes[1:] or nodes))

    def head(self, nodes: list[str]) -> None:
        self.kill(nodes[0])

    def kill(self, node: str) -> None:
        assert self.run.site.hpc("testbed", "kill-node", node).returncode == 0
        self.dead.append(node)

    def revive(self) -> None:
        while self.dead:
            assert self.run.site.hpc("testbed", "revive-node", self.dead.pop()).returncode == 0

    def term(self, _nodes: list[str]) -> None:
        self.run.site.type("scancel", "--signal=TERM", f"{self.run.status()['job_id']}.0")

    def preempt(self, nodes: list[str]) -> None:
        command = ["sbatch", "--partition=urgent", "--exclusive", f"--nodelist={nodes[0]}", "--output=/dev/null"]
        self.run.site.slurm(*command, "--wrap=true")


def test_a_run_survives_whatever_happens_to_it(site: Site) -> None:
    run = site.submit(
        "--data=data", "--nodes=2", "--spares=1", "--elastic", "--gpus-per-node=1", "--cpus-per-gpu=1",
        "--batch-size=64", f"--epochs={EPOCHS_PER_FAILURE * FAILURES}", "--lr=0.01", "--lr-scheduler=constant",
        "--log-every=1", "--hang-timeout=8s", f"--name=stress-{SEED}",
    )  # fmt: skip
    chaos = Chaos(run, SEED)
    with site.supervised():
        try:
            while len(chaos.done) < FAILURES:
                # Two failures without a new step between them end a run. Rank 0 may still log the step that the failure
                # interrupted, and a killed rank's last heartbeat may be one step old: so the run gets three new steps.
                done = max(run.steps(), default=0)
                run.wait("new steps", lambda done=done: max(run.steps(), default=0) > done + 2, seconds=300)
                time.sleep(chaos.random.uniform(0, 3))
                assert run.status()["state"] == "running", run.evidence()
                chaos.strike()
        finally:
            chaos.revive()
        run.wait("the end", lambda: run.status()["state"] in {"completed", "failed"}, seconds=300)
    status = run.status()
    assert status["state"] == "completed", run.evidence()
    run.assert_no_gap()
    assert run.steps()[-1] == status["total_steps"]
    assert status["interruptions"], "nothing was noticed"
    # An agent that is killed cannot tidy up: the next run on its node does.
    (site.path / "next.py").write_text("print('hello')\n")
    for command in (("git", "init", "-q"), ("git", "add", "next.py")):
        assert site.type(*command).returncode == 0
    site.submit("--nodes=4", "--name=next", "--", "next.py").wait_for_state("completed")
    assert_nothing_left(run)
    run.wait("the end of the jobs", lambda: not run.is_alive())
    for path in (site.path / "runs").rglob("*.lock"):
        pytest.fail(f"{path} is left")
    assert all(
        process_state(pid) is None for node in ("gpu01", "gpu02", "gpu03", "gpu04") for pid in rank_pids(run, node)
    )
