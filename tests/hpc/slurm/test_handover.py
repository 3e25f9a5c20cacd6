"""Who records the end of an attempt, and who submits the run's next job, without which nodes."""

import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed
from support.cluster import Command
from support.events import (
    claimed,
    event,
    of_training,
    records_in,
    resources_of,
    resubmitted,
    script_spec,
    submitted,
)

from hpc.base.errors import TorchrelayError
from hpc.base.files import append_json_line
from hpc.run.causes import Cause
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded, NodeFailed, Resubmitted
from hpc.run.events.ledger import EventWriter
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import bad_nodes, handover
from training.config.train_config import TrainConfig

CLAIM = """
import sys
from pathlib import Path
from hpc.run.events.history import History
from hpc.run.rundir import RunDir
from hpc.slurm import handover
run = RunDir(Path(sys.argv[1]))
assert handover.claim_next_job(run, 1, History.load(run))
"""


@pytest.fixture
def run(tmp_path: Path, slurm_command: Command) -> RunDir:
    """A run of which Slurm lists no job, on a cluster whose first node works."""
    slurm_command("squeue", "exit 0")
    slurm_command("sinfo", "echo 'gpu01|idle'")
    found = RunDir(tmp_path / "run")
    found.events.mkdir(parents=True)
    found.script.write_text("#!/bin/sh\n")
    spec_of().save(found)
    return found


def spec_of(script: tuple[str, ...] = ("a.py",), cluster: str = "slurm", **resources: Any) -> RunSpec:
    return script_spec(*script, cluster=cluster, resources=resources_of(**resources))


def attempt(**changes: Any) -> Attempt:
    usual = {"attempt": 1, "job_id": "7", "restart": 0, "secret": "n", "port": 1, "nodes": ("gpu01", "gpu02")}
    return Attempt(**{**usual, "started": time.time() - 300, **changes})


def claims(run: RunDir, attempt: int = 1) -> bool:
    return handover.claim_next_job(run, attempt, History.load(run))


def claimed_elsewhere(run: RunDir, seconds_ago: float) -> None:
    line = {"event": "resubmitting", "attempt": 1, "host": "another", "pid": 1, "started": 1}
    append_json_line(run.events / "next-001.jsonl", {"time": time.time() - seconds_ago, **line})


def test_one_claim_at_a_time(run: RunDir) -> None:
    assert claims(run)
    assert not claims(run), "the first one is not done"
    EventWriter(run.events / "x.jsonl", 1).append(Resubmitted(job_id="8", excluded=()))
    assert claims(run), "its job has ended before it started"
    assert claims(run, attempt=2), "another attempt"


def test_claim_of_a_dead_process_has_ended(run: RunDir) -> None:
    subprocess.run([sys.executable, "-c", CLAIM, str(run.path)], check=True)
    assert claims(run)


@pytest.mark.parametrize(("seconds_ago", "free"), [(50.0, False), (150.0, True)])
def test_claim_on_another_host_expires(run: RunDir, seconds_ago: float, free: bool) -> None:
    claimed_elsewhere(run, seconds_ago)
    assert claims(run) is free


def test_expired_claim_has_one_successor(run: RunDir) -> None:
    claimed_elsewhere(run, 150.0)
    seen = History.load(run)
    with ThreadPoolExecutor() as several:
        found = list(several.map(lambda _: handover.claim_next_job(run, 1, seen), range(8)))
    assert sum(found) == 1


def log_of(run: RunDir, *endings: str) -> None:
    """Write the log of job 7, whose first starts have ended as slurmstepd says, with a time of another zone."""
    run.logs.mkdir()
    ended = "slurmstepd-gpu01: error: *** STEP 7.0 ON gpu01 CANCELLED AT 2031-01-01T00:00:00 DUE TO {} ***\n"
    starts = [
        f"torchrelay: start {number} of job 7\n" + "x" * 90_000 + "\n" + (ended.format(words) if words else "")
        for number, words in enumerate(endings)
    ]
    (run.logs / "7_0_log.out").write_text("".join(starts))


PREEMPTION, REQUEUE = "PREEMPTION", "JOB REQUEUE"


@pytest.mark.parametrize(
    ("endings", "restart", "preempted"),
    [
        ([PREEMPTION], 0, True),
        ([PREEMPTION, ""], 1, False),
        ([PREEMPTION, PREEMPTION], 1, True),
        ([REQUEUE, PREEMPTION], 0, False),
        ([PREEMPTION, REQUEUE, "TIME LIMIT"], 2, False),
        ([PREEMPTION] * 2 + [""] * 2, 3, False),
    ],
    ids=["preempted", "an earlier start was", "both starts were", "the next start was", "out of time", "long ago"],
)
def test_preemption_in_the_log_of_the_job(run: RunDir, endings: list[str], restart: int, preempted: bool) -> None:
    log_of(run, *endings)
    assert handover.was_preempted(run, attempt(restart=restart)) is preempted
    assert not handover.was_preempted(run, attempt(job_id="8")), "there is no log"


def test_agents_that_were_killed_by_a_preemption_are_not_lost(run: RunDir) -> None:
    """With GraceTime=0 they have no time to record the end."""
    log_of(run, PREEMPTION)
    assert handover.record_missing_end(run, attempt(nodes=("gpu01",)), "its job is gone", suspect="gpu01")
    [ended] = records_in(run.events)
    assert (ended["cause"], ended.get("node")) == ("preempted", None)


@pytest.mark.parametrize(
    "refusal", ["Requested node configuration is not available", "Invalid node name specified"], ids=["22.05", "24.11"]
)
def test_job_that_needs_a_failed_node_is_submitted_with_the_users_exclusions_alone(
    run: RunDir, slurm_command: Command, refusal: str
) -> None:
    """Such as one with --sbatch nodelist=gpu01,gpu02. In quotes: what sbatch of that release says."""
    refused = f"echo 'sbatch: error: Batch job submission failed: {refusal}' >&2; exit 1"
    slurm_command("sbatch", f'case "$*" in *gpu02*) {refused};; *--exclude=gpu04*) echo 9;; esac')
    assert handover.submit_next_job(run, spec_of(exclude="gpu04"), ["gpu04", "gpu02"], []) == "9"


def test_job_that_was_queued_already_is_the_next_one(run: RunDir, slurm_command: Command) -> None:
    """The reply of an earlier sbatch may have been lost."""
    line = f"{{}}|{{}}|None||n/a|0|N/A|N/A|{run.script}|"
    jobs = [line.format(6, "PENDING"), line.format(7, "RUNNING"), line.format(8, "PENDING")]
    slurm_command("squeue", "\n".join(f"echo {shlex.quote(job)}" for job in jobs))
    slurm_command("sbatch", "echo 9")
    assert handover.submit_next_job(run, spec_of(), [], ["6", "7"]) == "8"
    assert handover.submit_next_job(run, spec_of(), [], ["6", "7", "8"]) == "9"


def test_next_job_waits_for_the_runs_that_the_run_waits_for(
    run: RunDir, tmp_path: Path, slurm_command: Command
) -> None:
    first = RunDir(tmp_path / "first")
    first.path.mkdir()
    first.script.write_text("#!/bin/sh\n")
    spec_of().save(first)
    slurm_command("squeue", f"echo '7|RUNNING|None||n/a|0|N/A|N/A|{first.script}|'")
    refused = "*--exclude*) echo 'is not available' >&2; exit 1"
    slurm_command("sbatch", f'case "$*" in {refused};; *--dependency=afterany:7*) echo 9;; esac')
    spec = replace(spec_of(), after=(str(first.path),))
    assert handover.submit_next_job(run, spec, [], []) == "9"
    assert handover.submit_next_job(run, spec, ["gpu02"], []) == "9", "without the exclusion it waits, too"


def test_job_gets_the_environment_of_the_submission_and_the_exclusions(run: RunDir, slurm_command: Command) -> None:
    slurm_command("sbatch", f'echo "$WORD $*" > {run.path}/asked; echo 9')
    assert handover.submit_next_job(run, spec_of(), ["gpu02", "gpu03"], []) == "9"
    assert "--exclude=gpu02,gpu03" in (run.path / "asked").read_text()
    run.environment.write_text(f'{{"WORD": "hers", "PATH": "{os.environ["PATH"]}"}}')
    assert handover.submit_next_job(run, spec_of(), [], []) == "9"
    asked = (run.path / "asked").read_text()
    assert asked.startswith("hers ")
    assert "--exclude" not in asked
    assert asked.endswith(f"{run.script}\n")


@pytest.mark.parametrize(
    ("refusal", "excluded"), [("Invalid account", ["gpu02"]), ("is not available", ["gpu04"])], ids=["other", "given"]
)
def test_refusal_that_no_other_exclusions_would_change_is_told(
    run: RunDir, slurm_command: Command, refusal: str, excluded: list[str]
) -> None:
    slurm_command("sbatch", f"echo >> {run.path}/asked; echo '{refusal}' >&2; exit 1")
    with pytest.raises(TorchrelayError, match=refusal):
        handover.submit_next_job(run, spec_of(exclude="gpu04"), excluded, [])
    assert (run.path / "asked").read_text() == "\n", "it was asked once"


@pytest.mark.parametrize(
    ("known", "failed", "expected"),
    [
        ([], ["gpu02"], ["gpu02"]),
        # The job needs two of five nodes, of which one is down.
        (["gpu01", "gpu02", "gpu03"], [], ["gpu03", "gpu02"]),
        (["gpu01"], ["gpu02", "gpu03"], ["gpu02", "gpu03"]),
        (["gpu01"], ["gpu02", "gpu03", "gpu04"], []),
        (["gpu05", "gpu01"], ["gpu02"], ["gpu02", "gpu01"]),
    ],
)  # fmt: skip
def test_next_job_excludes_as_many_of_the_failed_nodes_as_it_can(
    run: RunDir, slurm_command: Command, known: list[str], failed: list[str], expected: list[str]
) -> None:
    slurm_command("sinfo", "for n in 1 2 3 4; do echo \"gpu0$n|gpu*|idle\"; done; echo 'gpu05|gpu*|down'")
    for node in known:
        bad_nodes.learn(run, NodeFailed(node=node, cause=Cause.BAD_NODE))
    assert bad_nodes.nodes_to_exclude(run, spec_of(nodes="2"), failed) == expected


def test_nodes_that_the_user_excludes_are_not_among_those_that_are_left(run: RunDir, slurm_command: Command) -> None:
    slurm_command("sinfo", "for n in 1 2 3 4; do echo \"gpu0$n|big|idle\"; done; echo 'gpu09|gpu*|idle'")
    slurm_command("scontrol", 'case "$*" in "show hostnames gpu0[3-4]") echo gpu03; echo gpu04;; esac')
    spec = spec_of(nodes="1", partition="big", exclude="gpu0[3-4]")

    def excluded(*failed: str) -> list[str]:
        return bad_nodes.nodes_to_exclude(run, spec, failed)

    assert excluded() == ["gpu0[3-4]"]
    assert excluded("gpu01") == ["gpu0[3-4]", "gpu01"]
    assert excluded("gpu01", "gpu02") == ["gpu0[3-4]"], "which of them work is unknown"


@pytest.mark.parametrize(
    ("cluster", "sinfo", "cause", "found", "node", "detail"),
    [
        ("slurm", "echo 'gpu01|idle'; echo 'gpu02|down'", Cause.LOST, "node_failure", "gpu02", "gone; down: gpu02"),
        ("slurm", "echo 'gpu02|down'", Cause.NODE_FAILURE, "node_failure", "gpu02", "gone; down: gpu02"),
        ("slurm", "echo 'gpu02|down'", Cause.TIME_LIMIT, "time_limit", "gpu01", "gone"),
        ("slurm", "echo no answer >&2; exit 1", Cause.LOST, "lost", "gpu01", "gone; Slurm does not report its nodes: "),
        ("local", "echo 'gpu02|down'", Cause.LOST, "lost", "gpu01", "gone"),
    ],
)
def test_end_that_no_agent_recorded(  # noqa: PLR0917
    run: RunDir, slurm_command: Command, cluster: str, sinfo: str, cause: Cause, found: str, node: str, detail: str
) -> None:
    slurm_command("sinfo", sinfo)
    spec_of(cluster=cluster).save(run)
    last = attempt(nodes=("gpu01", "gpu02"))
    assert not handover.has_ended(run, 1)
    assert handover.record_missing_end(run, last, "gone", cause=cause, suspect="gpu01")
    assert handover.has_ended(run, 1)
    assert not handover.has_ended(run, 2)
    assert not handover.record_missing_end(run, last, "again", cause=cause), "the first record stays"
    [ended] = records_in(run.events)
    assert (ended["event"], ended["attempt"], ended["cause"], ended["node"]) == ("attempt_ended", 1, found, node)
    assert ended["detail"].startswith(detail)
    assert (ended["step"], ended["last_heard"]) == (None, last.started), "a script has no steps; no agent was heard"


def test_attempt_lasted_until_its_last_heartbeat_and_its_last_step(run: RunDir) -> None:
    run.alive.touch()
    run.train_metrics.parent.mkdir()
    heard = time.time() - 60
    os.utime(run.alive, (heard, heard))
    append_json_line(run.train_metrics, {"step": 7, "attempt": 1})
    append_json_line(run.train_metrics, {"step": 8, "attempt": 1})
    assert handover.record_missing_end(run, attempt(), "gone")
    [ended] = records_in(run.events)
    assert (ended["step"], ended.get("node")) == (8, None)
    assert abs(ended["last_heard"] - heard) < 30


@pytest.mark.parametrize("step", [10.0, "e1", True, None])
def test_step_that_is_no_whole_number_does_not_make_the_record_of_the_end_unreadable(run: RunDir, step: object) -> None:
    """A user's script may write the file of the metrics itself."""
    run.train_metrics.parent.mkdir()
    append_json_line(run.train_metrics, {"step": step})
    assert handover.record_missing_end(run, attempt(), "gone")
    [ended] = History.load(run).of(AttemptEnded)
    assert ended.step is None


def test_training_that_logged_nothing_ended_at_its_start(run: RunDir) -> None:
    replace(spec_of(), **of_training(TrainConfig(synthetic=True))).save(run)
    assert handover.record_missing_end(run, attempt(), "gone")
    [ended] = records_in(run.events)
    assert ended["step"] == 0


@pytest.mark.parametrize(
    ("names", "unfinished"),
    [
        ([], None),
        (["submitting"], "submitting"),
        (["submitting", "submitted"], None),
        (["resubmitting"], "resubmitting"),
        (["resubmitting", "claimed"], "resubmitting"),
        (["resubmitting", "resubmitted"], None),
        (["resubmitting", "requeued"], None),
        (["resubmitting", "resubmitted", "resubmitting"], "resubmitting"),
    ],
)
def test_handover_is_unfinished_until_its_job_is_recorded(names: list[str], unfinished: str | None) -> None:
    kinds = {
        "claimed": claimed(),
        "submitted": submitted(),
        "submitting": event("submitting", host="h", pid=1),
        "resubmitting": event("resubmitting", host="h", pid=1),
        "resubmitted": resubmitted(),
        "requeued": event("requeued", job_id="7"),
    }
    for number, attempt in ((0, None), (3, 3)):
        events = [changed(kinds[name], attempt=3 if name == "claimed" else attempt) for name in names]
        found = History([*events, changed(kinds["resubmitting"], attempt=2)]).unfinished_handover(number)
        assert (found.kind if found else None) == unfinished
