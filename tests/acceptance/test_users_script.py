"""A user's script with the helper is preempted under the supervisor, and loses a rank: it ends as undisturbed."""

import pytest
from support.cluster import TWO_NODES, TWO_RANKS_HERE, Run, Site, add_script, preempt
from support.relay_script import SCRIPT

from hpc.base.files import read_json_lines

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
# About 20 s of them: the script sleeps after each.
STEPS = 1500


def submit(site: Site, name: str, *flags: str, **environment: str) -> Run:
    """The script, whose ranks write their results into the run directory."""
    add_script(site, "script.py", SCRIPT)
    words = ("--", "script.py", str(STEPS))
    results = str(site.path / "runs" / name)
    return site.submit(*TWO_NODES, *flags, f"--name={name}", *words, RESULTS=results, **environment)


def last_results(run: Run) -> list[dict[str, object]]:
    """What each rank has computed in the end, on which weights, random numbers and objects of its own."""
    found = [list(read_json_lines(run.directory.path / f"{rank}.jsonl"))[-1] for rank in (0, 1)]
    return [{key: one[key] for key in ("step", "stopped", "weights", "seen")} for one in found]


def losses(run: Run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_json_lines(run.directory.train_metrics)}


def test_script_loses_no_step_to_a_preemption_and_few_to_a_killed_rank(ordinary_user: Site, site: Site) -> None:
    whole = submit(ordinary_user, "whole", *TWO_RANKS_HERE, FAST="1")
    run = submit(ordinary_user, "broken")
    run.wait_for_more_steps()
    preempt(run, site)
    run.wait_for_more_steps(2)
    drill = ordinary_user.hpc("drill", "broken", "worker-kill", "--yes", "--json")
    assert drill.returncode == 0, drill.stdout + drill.stderr
    status = run.wait_for_state("completed")

    assert [one["cause"] for one in status["interruptions"]] == ["preempted", "crashed"]
    preempted, crashed = status["interruptions"]
    assert preempted["steps_lost"] == 0
    starts = run.events("train_started")
    assert [start["source"] for start in starts] == [None, "checkpoint", "snapshot"]
    assert starts[1]["step"] == run.events("attempt_ended")[0]["step"] < starts[2]["step"], "later than the checkpoint"
    assert crashed["steps_lost"] == crashed["step"] - starts[2]["step"]
    assert crashed["rank"] == 1
    assert whole.wait_for_state("completed")["interruptions"] == []
    assert losses(run) == losses(whole), "the same course"
    assert last_results(run) == last_results(whole)
    assert status["step"] == STEPS
