"""One run is preempted, then a rank is killed, then one hangs: it ends with the bits of an undisturbed run."""

import os
import signal

import pytest
from support.cluster import (
    SLOW_STEPS,
    TWO_RANKS_HERE,
    VERY_FEW_EPOCHS,
    Run,
    Site,
    assert_ended_as,
    assert_nothing_left,
    preempt,
    rank_pids,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def strike(run: Run, number: int, count: int) -> None:
    """Send a signal to the rank of the other node, and wait until it has interrupted the run for so many times."""
    [victim] = rank_pids(run, run.events("claimed")[-1]["nodes"][1])
    os.kill(victim, number)
    run.wait("the interruption", lambda: len(run.events("interruption")) == count)


def test_preemption_killed_rank_and_hang_leave_the_bits_as_they_are(site: Site) -> None:
    run = site.submit("--data=data", "--nodes=2", *VERY_FEW_EPOCHS, "--hang-timeout=8s", **SLOW_STEPS)
    run.wait_for_more_steps()
    preempt(run)
    run.wait("the preemption", lambda: run.events("attempt_ended"))
    stopped = run.steps()[-1]
    run.wait_for_next_job()
    undisturbed = site.submit("--data=data", "--name=undisturbed", *VERY_FEW_EPOCHS, *TWO_RANKS_HERE)
    run.wait_for_more_steps(2)
    strike(run, signal.SIGKILL, 1)
    run.wait("the restored ranks", lambda: len(run.events("train_started")) == 3)
    run.wait_for_more_steps(2)
    strike(run, signal.SIGSTOP, 2)
    status = run.wait_for_state("completed")

    assert_ended_as(run, undisturbed)

    first, second = status["attempts"]
    assert (first["cause"], second["cause"]) == ("preempted", "completed")
    assert first["last_step"] == second["first_step"] == stopped, "it continued at the very next step"
    assert [len(run.events(kind)) for kind in ("requeued", "resubmitted")] == [0, 1]
    preempted, killed, hung = status["interruptions"]
    assert (preempted["cause"], preempted["steps_lost"]) == ("preempted", 0)
    assert (killed["cause"], killed["node"]) == ("crashed", second["nodes"][1])
    assert "signal SIGKILL" in killed["detail"]
    assert hung["cause"] == "hang"
    assert "is stopped, and the others wait for it" in hung["detail"]
    assert max(killed["steps_lost"], hung["steps_lost"]) <= 6, "the snapshot interval and the step under way"
    logs = "".join(path.read_text() for path in run.directory.attempt_logs(2).glob("rank-*.log"))
    assert "Fatal Python error: Aborted" in logs, "the stacks of the ranks that waited"
    assert_nothing_left(run)
