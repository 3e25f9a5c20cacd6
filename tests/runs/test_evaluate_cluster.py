"""`hpc evaluate` on a real Slurm, by an ordinary user, interrupted in the middle."""

import json
import os
import signal

import pytest
from support.cluster import SMALL_BATCH, TWO_NODES, Run, Site, preempt, rank_pids

from hpc.core.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]


def test_evaluation_that_is_preempted_starts_again_and_counts_every_image_once(ordinary_user: Site, site: Site) -> None:
    """On two nodes, of all 60,000 images of Fashion-MNIST, by a model that has seen some of them."""
    source = ordinary_user.submit("--data=data", "--name=source", "--epochs=1", *TWO_NODES, *SMALL_BATCH)
    source.wait_for_state("completed")
    flags = ("--data=fashion-mnist", "--split=train", "--nodes=2")
    done = ordinary_user.hpc("evaluate", "source", *flags, "--name=evaluation", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    run = Run(ordinary_user, RunDir(ordinary_user.path / "runs" / "evaluation"), answer["job_id"])
    run.wait("the first batches", lambda: run.events("first_step"))
    # Slurm's SIGCONT comes with the SIGTERM of the preemption: the ranks are in the middle until then.
    for pid in [pid for node in run.nodes() for pid in rank_pids(run, node)]:
        os.kill(pid, signal.SIGSTOP)
    assert not run.directory.final_result.exists()
    preempt(run, site)
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted", "completed"]
    result = json.loads(run.directory.final_result.read_text())
    assert (result["test_total"], result["world_size"], result["attempt"]) == (60_000, 2, 2)
    alone = ordinary_user.hpc("evaluate", "source", *flags[:2], "--nodes=1", "--name=alone", "--wait", "--json")
    assert alone.returncode == 0, alone.stderr
    undisturbed = RunDir(ordinary_user.path / "runs" / "alone").final
    assert (run.directory.final / "confusion.csv").read_bytes() == (undisturbed / "confusion.csv").read_bytes()
    assert result["test_loss"] == json.loads((undisturbed / "result.json").read_text())["test_loss"]
