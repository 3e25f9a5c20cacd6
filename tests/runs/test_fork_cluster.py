"""`hpc fork` of a run that trains, and an `hpc evaluate` that is interrupted, on Slurm, by an ordinary user."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest
from support.cluster import TINY_BATCH, TWO_NODES, Run, Site, preempt, rank_pids

from hpc.base.files import read_json_lines
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]
EPOCH = 118  # steps


def made_by(site: Site, verb: str, source: Run, name: str, *flags: str) -> Run:
    """The run that a verb makes of another one."""
    done = site.hpc(verb, source.directory.name, f"--name={name}", "--json", *flags)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return Run(site, RunDir(site.path / "runs" / name), answer["job_id"])


def stop_ranks(run: Run) -> list[int]:
    """Have all ranks stand still until they get SIGCONT. Returns their processes."""
    pids = [pid for node in run.nodes() for pid in rank_pids(run, node)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def assert_continues(run: Run, since: int, until: int) -> None:
    """It has trained the steps after `since` alone, and has the metrics of those before."""
    run.wait_for_state("completed")
    assert [event["step"] for event in run.events("train_started")] == [since]
    attempts = {line["step"]: line["attempt"] for line in read_json_lines(run.directory.train_metrics)}
    assert attempts == {**dict.fromkeys(range(1, since + 1), 0), **dict.fromkeys(range(since + 1, until + 1), 1)}


def assert_counts_every_image_once(source: Run, site: Site) -> None:
    """On two nodes, of all 60,000 images of Fashion-MNIST, preempted in the middle."""
    flags = ("--data=fashion-mnist", "--split=train", "--nodes=2")
    run = made_by(source.site, "evaluate", source, "evaluation", *flags)
    run.wait("the first batches", lambda: run.events("first_step"))
    # Slurm's SIGCONT comes with the SIGTERM of the preemption: the ranks are in the middle until then.
    stop_ranks(run)
    assert not run.directory.final_result.exists()
    preempt(run, site)
    run.wait_for_next_job()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted", "completed"]
    result = json.loads(run.directory.final_result.read_text())
    assert (result["test_total"], result["world_size"], result["attempt"]) == (60_000, 2, 2)
    with (run.directory.final / "confusion.csv").open() as file:
        _, *rows = csv.reader(file)
    assert [sum(map(int, row[1:])) for row in rows] == [6_000] * 10


def test_fork_of_a_running_run_is_evaluated_over_a_preemption(ordinary_user: Site, site: Site) -> None:
    endless = ("--data=data", *TWO_NODES, *TINY_BATCH, "--epochs=100000", "--log-every=1", "--checkpoint-every=5")
    source = ordinary_user.submit("--name=source", "--lr-scheduler=constant", *endless)
    source.wait_for_steps(20)
    pids = stop_ranks(source)
    epochs = source.steps()[-1] // EPOCH + 2
    saved = max(event["step"] for event in source.events("checkpoint_saved"))
    fork = made_by(ordinary_user, "fork", source, "fork", "--lr=0.01", "--nodes=1", f"--epochs={epochs}")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    source.wait_for_steps(len(source.steps()) + 5)
    source.cancel()
    begin = int(Path(str(RunSpec.load(fork.directory).forked_from)).name.removeprefix("step-"))
    assert begin >= saved
    assert_continues(fork, begin, epochs * EPOCH)
    assert_counts_every_image_once(fork, site)
