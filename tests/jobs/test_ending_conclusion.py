"""What the head node's agent records when an attempt ends, and whether and where the run goes on; without Slurm."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE
from support.cluster import Command
from support.events import attempt_ended, cancelled, claimed, joined, resubmitted, train_started, write_events
from support.reported_nodes import ReportedNodes

from hpc.core import ledger
from hpc.core.attempts import attempts_of
from hpc.core.causes import Cause
from hpc.core.files import append_json_line
from hpc.core.nodedir import HeldNodeDir, NodeDir
from hpc.core.rundir import RunDir
from hpc.spec import Resources, RunSpec
from jobs import ending, node_attempt
from jobs.claim import event_file
from jobs.control.coordinator import Coordinator, Failure
from jobs.control.messages import Phase
from jobs.node_attempt import NodeAllocation, NodeAttempt
from jobs.stop_request import STOP_SIGNALS, StopRequest
from training.config.train_config import TrainConfig

HOSTS = ("gpu01", "gpu02", "gpu03")
TRAINING: dict[str, Any] = {"train": TrainConfig(synthetic=True), "script": ()}
RUNNING = "JobState=RUNNING Restarts=0 Reason=None"


class Slurm:
    """Slurm's answers; what it was asked to do is in `asked`."""

    def __init__(self, command: Command, path: Path) -> None:
        self._command, self._log = command, path / "asked"
        self._log.touch()
        for name, answer in {"scancel": "", "squeue": "", "sbatch": "echo 8"}.items():
            self._command(name, f'echo "{name} $*" >> {self._log}; {answer}')
        self.says_of_job(RUNNING)
        self.says_of_nodes(*("idle" for _ in range(5)))

    def says_of_job(self, fields: str) -> None:
        """Set the answer to `scontrol show job`."""
        show = f'case "$*" in *show*job*) echo \'JobId=7 {fields}\';; *) echo "scontrol $*" >> {self._log};; esac'
        self._command("scontrol", show)

    def says_of_nodes(self, *states: str) -> None:
        """Set the states of gpu01, gpu02 and so on."""
        nodes = [(f"gpu0{number}", state) for number, state in enumerate(states, 1)]
        listed = "\n".join(f"{node}|gpu*|{state}" for node, state in nodes)
        short = "\n".join(f"{node}|{state}" for node, state in nodes)
        self._command("sinfo", f"case \"$*\" in *%P*) echo '{listed}';; *) echo '{short}';; esac")

    @property
    def asked(self) -> list[str]:
        """The first two words of each request that changes something."""
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [" ".join(line[:2]) for line in lines if line[0] != "squeue"]


@pytest.fixture
def slurm(slurm_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(node_attempt, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(ending, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(ending, "_CONFIRM_POLL_SECONDS", 0.01)
    return Slurm(slurm_command, tmp_path)


class Ending:
    """An attempt on three nodes that has just ended, as its head node's agent sees it."""

    def __init__(self, path: Path, *events: ledger.Event, local: bool = False, node_rank: int = 0, **spec: Any) -> None:
        settings = {"script": ("a.py",), "data": None, "stage_dir": "/tmp", "resources": Resources(nodes="2:3"), **spec}
        cluster = "local" if local else "slurm"
        self.run = RunDir(path / "r")
        write_events(self.run, claimed(time.time() - 900, nodes=HOSTS), *events, file="attempt-001-node-00.jsonl")
        RunSpec(**{"name": "r", "cluster": cluster, **settings}).save(self.run)
        self.run.script.write_text("#!/bin/sh\n")
        names = HOSTS if not local else ("localhost",) * 3
        self.node = NodeAttempt(
            run=self.run,
            spec=RunSpec.load(self.run),
            allocation=NodeAllocation(
                cluster=cluster, job_id="7", restart=0, hostnames=names, node_rank=node_rank, cpus=2
            ),
            attempt=attempts_of(ledger.read(self.run.events))[0],
            writer=event_file(self.run, 1, node_rank),
        )
        self.nodes, self.stop = ReportedNodes(3), StopRequest()
        for rank in (1, 2):
            self.nodes.report(rank, phase=Phase.LEFT)
        self.coordinator = Coordinator(self.node, cast("Any", self.nodes), self.stop)
        self.polls = 0
        self.monitor: Any = SimpleNamespace(poll=self._poll, node_dir=NodeDir(path / "memory"), last_step=30)

    def _poll(self) -> None:
        """Have the second node's ranks end after a while."""
        self.polls += 1
        if self.polls == 3 and not self.nodes.silent[1]:
            self.nodes.report(1, phase=Phase.LEFT)

    def conclude(self) -> int:
        return ending.conclude(self.node, cast("Any", self.nodes), self.monitor, self.coordinator)

    def fails(self, cause: Cause = Cause.CRASHED, **fields: Any) -> None:
        """Have the coordinator end the attempt for this failure."""
        usual = {"failed_at": 50.0, "noticed_at": 51.0, "step": 20, "detail": "x", "rank": 1, "node": "gpu02"}
        self.coordinator.failure = Failure(cause=cause, **{**usual, "signature": "s", **fields})

    @property
    def end(self) -> dict[str, Any]:
        """What is recorded of the end, without what every event has."""
        [event] = self.node.events("attempt_ended")
        return {name: value for name, value in event.items() if name not in {"time", "event", "attempt"}}

    def continued(self) -> list[str]:
        """The events that say how the run goes on."""
        kinds = ("requeued", "resubmitted", "excluded", "not_continued")
        return [event["event"] for event in self.node.run_events() if event["event"] in kinds]


@pytest.fixture
def ended(tmp_path: Path, slurm: Slurm) -> Callable[..., Ending]:  # noqa: ARG001  # replaces Slurm's commands
    return lambda *events, **settings: Ending(tmp_path, *events, **settings)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NodeDir, RunDir]]:
    """The snapshots that were to be saved; each is of step 40, and saved if the attempt is the newest."""
    calls = []

    def save(node_dir: NodeDir, run: RunDir, check: Callable[[], None]) -> int:
        check()
        calls.append((node_dir, run))
        return 40

    monkeypatch.setattr(ending, "save_newest_as_checkpoint", save)
    return calls


# --- the head node's agent ---


def test_script_that_is_done(ended: Callable[..., Ending], slurm: Slurm, saved: list[Any]) -> None:
    done = ended()
    done.coordinator.done = True
    assert done.conclude() == 0
    assert done.end == {"cause": "completed", "step": None}
    assert (done.continued(), slurm.asked, saved) == ([], [], [])


def test_script_that_ended_with_0_after_a_signal_goes_on(ended: Callable[..., Ending], slurm: Slurm) -> None:
    stopped = ended()
    stopped.coordinator.done = True
    stopped.stop.handle(STOP_SIGNALS[1], None)
    assert stopped.conclude() == 0
    assert stopped.end == {"cause": "requeued", "step": None}
    assert slurm.asked == ["scontrol requeue"]


def test_training_is_done_when_its_result_is_there(ended: Callable[..., Ending], saved: list[Any]) -> None:
    done = ended(**TRAINING)
    done.coordinator.done = True
    done.coordinator.last_step = 117
    done.run.final_result.parent.mkdir(parents=True)
    done.run.final_result.touch()
    done.stop.handle(STOP_SIGNALS[1], None)
    assert done.conclude() == 0
    assert done.end == {"cause": "completed", "step": 117}
    assert not saved


def test_training_without_a_result_is_not_done(ended: Callable[..., Ending], saved: list[Any], slurm: Slurm) -> None:
    failed = ended(**TRAINING)
    failed.coordinator.done = True
    assert failed.conclude() == 0
    assert failed.end == {"cause": "crashed", "step": 0}
    assert saved == [(failed.monitor.node_dir, failed.run)]
    [event] = failed.node.events("snapshot_saved")
    assert (event["step"], 0.0 <= event["seconds"] < 30) == (40, True)
    assert slurm.asked == ["scontrol requeue"]


def test_failure_is_recorded_with_its_step(ended: Callable[..., Ending], slurm: Slurm) -> None:
    failed = ended(**TRAINING)
    failed.fails()
    failed.coordinator.last_step = 25
    assert failed.conclude() == 0
    expected = {"cause": "crashed", "detail": "x", "failed_at": 50.0, "node": "gpu02", "rank": 1, "signature": "s"}
    assert failed.end == {**expected, "step": 20}
    assert failed.continued() == ["requeued"]
    assert slurm.asked == ["scontrol requeue"]


@pytest.mark.parametrize(
    ("failed_step", "coordinator", "metrics", "found"),
    [(None, 25, 31, 31), (None, 25, 5, 25), (0, 3, 2, 0), (None, 0, 0, 0)],
)
def test_last_step_is_the_furthest_that_is_known(
    ended: Callable[..., Ending], failed_step: int | None, coordinator: int, metrics: int, found: int
) -> None:
    failed = ended(**TRAINING)
    failed.fails(step=failed_step)
    failed.coordinator.last_step = coordinator
    if metrics:
        failed.run.train_metrics.parent.mkdir()
        append_json_line(failed.run.train_metrics, {"step": metrics})
    failed.conclude()
    assert failed.end["step"] == found


def test_preemption_hides_the_failure_that_it_caused_but_not_its_step(
    ended: Callable[..., Ending], slurm: Slurm
) -> None:
    preempted = ended(**TRAINING)
    preempted.fails(step=20)
    preempted.coordinator.last_step = 15
    slurm.says_of_job("JobState=RUNNING Restarts=0 PreemptTime=2026-01-02T00:00:00 StartTime=2026-01-01T00:00:00")
    assert preempted.conclude() == 0
    assert preempted.end == {"cause": "preempted", "step": 20}


def test_same_failure_twice_is_final(ended: Callable[..., Ending], slurm: Slurm) -> None:
    first = attempt_ended(cause="crashed", step=20, signature="s")
    failed = ended(first, claimed(attempt=2, nodes=HOSTS), **TRAINING)
    failed.node = replace(failed.node, attempt=attempts_of(ledger.read(failed.run.events))[1])
    failed.fails()
    assert failed.conclude() == 1
    assert failed.end["cause"] == "crashed"
    assert slurm.asked == []


@pytest.mark.parametrize(
    ("signal", "job", "cause", "exit_code", "asked"),
    [
        ("SIGTERM", RUNNING, "requeued", 0, ["scontrol requeue"]),
        ("SIGUSR2", RUNNING, "time_limit", 0, ["scontrol requeue"]),
        ("SIGTERM", "JobState=COMPLETING Restarts=1 Reason=None", "requeued", 0, []),
        ("SIGTERM", "JobState=COMPLETING Restarts=0 Reason=None", "cancelled", 1, []),
        ("SIGTERM", "JobState=PREEMPTED Restarts=0 Reason=None", "preempted", 0, ["scontrol requeue"]),
        (None, "JobState=NODE_FAIL Restarts=0 Reason=None", "node_failure", 0, []),
        (None, RUNNING, "crashed", 0, ["scontrol requeue"]),
    ],
)
def test_slurm_says_why_an_attempt_ended_and_may_requeue_it_itself(  # noqa: PLR0917
    ended: Callable[..., Ending],
    slurm: Slurm,
    signal: str | None,
    job: str,
    cause: str,
    exit_code: int,
    asked: list[str],
) -> None:
    stopped = ended()
    slurm.says_of_job(job)
    if signal:
        stopped.stop.handle(next(each for each in STOP_SIGNALS if each.name == signal), None)
    assert stopped.conclude() == exit_code
    assert (stopped.end["cause"], slurm.asked) == (cause, asked)


def test_slurm_that_does_not_answer_does_not_hide_the_cause(
    ended: Callable[..., Ending], slurm_command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ended()
    failed.fails(Cause.HANG)
    slurm_command("scontrol", 'case "$*" in *show*) echo away >&2; exit 1;; esac')
    assert failed.conclude() == 0
    assert failed.end["cause"] == "hang"
    assert "Slurm does not report the state of this job: away" in capsys.readouterr().out


def test_preemption_that_slurm_has_written_into_the_log_alone(ended: Callable[..., Ending]) -> None:
    """With GraceTime=0."""
    preempted = ended()
    preempted.fails()
    preempted.run.logs.mkdir()
    at = datetime.now().isoformat(timespec="seconds")  # noqa: DTZ005 - as Slurm prints it
    log = preempted.run.logs / "7_0_log.out"
    log.write_text(f"slurmstepd-gpu01: error: *** STEP 7.0 ON gpu01 CANCELLED AT {at} DUE TO PREEMPTION ***\n")
    assert preempted.conclude() == 0
    assert preempted.end["cause"] == "preempted"


def test_run_that_slurm_will_not_continue_has_failed(ended: Callable[..., Ending], slurm_command: Command) -> None:
    stopped = ended()
    stopped.fails()
    for name in ("scontrol", "sbatch", "scancel"):
        slurm_command(name, "echo 'Requested operation is presently disabled' >&2; exit 1")
    assert stopped.conclude() == 1
    assert stopped.continued() == ["not_continued"]


def test_cancelled_run_stays_cancelled(ended: Callable[..., Ending], slurm: Slurm) -> None:
    stopped = ended()
    write_events(stopped.run, cancelled(), file=stopped.run.cancellation.name)
    stopped.fails()
    assert stopped.conclude() == 1
    assert stopped.end == {"cause": "cancelled", "step": None}
    assert slurm.asked == []


def test_end_that_others_have_recorded_stays(ended: Callable[..., Ending], slurm: Slurm) -> None:
    late = ended()
    assert ending.record_end(late.node, cause=Cause.NODE_FAILURE, step=None)
    late.fails()
    assert late.conclude() == 1
    assert late.end["cause"] == "node_failure"
    assert slurm.asked == []


@pytest.mark.parametrize("how", ["lost", "stuck", "silent"])
def test_job_with_a_node_that_does_not_answer_is_replaced(ended: Callable[..., Ending], slurm: Slurm, how: str) -> None:
    lost = ended()
    lost.fails(Cause.NODE_FAILURE)
    if how == "lost":
        lost.coordinator.lost = {1: time.time() - 890}
    elif how == "stuck":
        lost.coordinator.stuck = {1}
    else:
        lost.nodes.report(1, phase=Phase.RUNNING)
        lost.nodes.silent[1] = 6.0
    assert lost.conclude() == 0
    assert lost.continued() == ["resubmitted"]
    assert [event["excluded"] for event in lost.node.events("resubmitted")] == [["gpu02"]]
    assert slurm.asked == ["sbatch --parsable", "scancel 7"]


def test_job_whose_node_was_lost_long_ago_is_requeued(ended: Callable[..., Ending], slurm: Slurm) -> None:
    """Slurm knows by now, or the node has come back."""
    lost = ended()
    lost.fails(Cause.HANG)
    lost.coordinator.lost = {1: time.time() - 910}
    assert lost.conclude() == 0
    assert slurm.asked == ["scontrol requeue"]


def test_requeued_job_avoids_bad_nodes(ended: Callable[..., Ending], slurm: Slurm) -> None:
    bad = ended()
    bad.fails(Cause.BAD_NODE, node="gpu03")
    bad.coordinator.bad_nodes = {2}
    assert bad.conclude() == 0
    assert bad.continued() == ["requeued", "excluded"]
    assert [event["excluded"] for event in bad.node.events("excluded")] == [["gpu03"]]
    assert slurm.asked == ["scontrol requeue", "scontrol update"]


def test_ranks_of_the_other_nodes_end_first(ended: Callable[..., Ending]) -> None:
    waiting = ended()
    waiting.nodes.report(1, phase=Phase.RUNNING)
    assert waiting.conclude() == 0
    assert waiting.polls == 3


def test_ranks_that_do_not_end_are_not_waited_for_for_ever(
    ended: Callable[..., Ending], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_OTHERS_SECONDS", 0.1)
    waiting = ended()
    waiting.nodes.report(2, phase=Phase.ENDED)
    assert waiting.conclude() == 0
    assert waiting.polls > 1
    assert slurm.asked == ["scontrol requeue"], "its node is not lost"


@pytest.mark.parametrize(("cause", "exit_code"), [("crashed", LOCAL_REQUEUE_RETURN_CODE), ("bad_input", 1)])
def test_run_without_slurm_is_started_again_by_submitit(
    ended: Callable[..., Ending], slurm: Slurm, cause: str, exit_code: int
) -> None:
    local = ended(local=True)
    local.fails(Cause(cause))
    assert local.conclude() == exit_code
    assert local.continued() == ["requeued"] * (cause == "crashed")
    assert slurm.asked == []


def test_snapshot_that_cannot_be_saved_stays_in_memory(
    ended: Callable[..., Ending], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ended()

    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(ending, "save_newest_as_checkpoint", refuse)
    failed.fails()
    assert failed.conclude() == 0
    assert failed.node.has_unsaved_snapshot.is_set()
    assert "could not be saved and stays in the memory of gpu01: no space" in capsys.readouterr().out
    assert not failed.node.events("snapshot_saved")


def test_attempt_that_is_not_the_newest_saves_no_snapshot(ended: Callable[..., Ending], saved: list[Any]) -> None:
    old = ended()
    write_events(old.run, claimed(attempt=2, nodes=HOSTS, job_id="8"), file="attempt-002-node-00.jsonl")
    ending.save_snapshot(old.node, old.monitor.node_dir)
    assert not saved
    assert old.node.has_unsaved_snapshot.is_set()


# --- an agent that has failed ---


def test_failed_agent_is_a_failure_of_its_node(
    ended: Callable[..., Ending], slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ended(**TRAINING)
    assert ending.conclude_failed_agent(failed.node, Cause.CRASHED, "KeyError: 12") == 0
    expected = {"cause": "crashed", "step": 0, "detail": "KeyError: 12", "node": "gpu01", "signature": "KeyError: #"}
    assert failed.end == expected
    assert "attempt 1 ended: crashed (KeyError: 12)" in capsys.readouterr().out
    assert slurm.asked == ["scontrol requeue"], "whose node may be used again"


def test_agent_that_was_asked_to_stop_has_not_failed(ended: Callable[..., Ending], slurm: Slurm) -> None:
    stopped = ended()
    assert ending.conclude_failed_agent(stopped.node, Cause.BAD_NODE, "x", "SIGTERM") == 0
    assert stopped.end["cause"] == "requeued"
    assert slurm.asked == ["scontrol requeue"]


@pytest.mark.parametrize(
    ("cause", "with_joined", "lost_first", "continued", "excluded"),
    [
        (Cause.LOST, HOSTS, False, ["requeued", "excluded"], ["gpu01"]),
        (Cause.LOST, ("gpu01", "gpu03"), False, ["resubmitted"], ["gpu02", "gpu01"]),
        (Cause.BAD_NODE, HOSTS, False, ["requeued", "excluded"], ["gpu01"]),
        (Cause.CRASHED, ("gpu01",), False, ["requeued"], None),
        (Cause.CRASHED, HOSTS, True, ["resubmitted"], ["gpu03"]),
        (Cause.LOST, ("gpu01", "gpu02"), True, ["resubmitted"], ["gpu03", "gpu01"]),
        (Cause.LOST, ("gpu02", "gpu03"), False, ["requeued", "excluded"], ["gpu01"]),
    ],
    ids=[
        "killed agents",
        "node that never joined",
        "bad node",
        "defect",
        "lost node",
        "lost node that never joined",
        "head node that never joined",
    ],
)
def test_nodes_that_the_next_job_avoids_after_a_failed_agent(
    ended: Callable[..., Ending], cause: Cause, with_joined: tuple[str, ...], lost_first: bool, continued: list[str],
    excluded: list[str] | None,
) -> None:  # fmt: skip
    failed = ended(*(joined(node=name, node_rank=HOSTS.index(name)) for name in with_joined))
    if lost_first:
        failed.node.record_event("node_lost", node="gpu03", last_heard=1.0, detail="lost contact with gpu03")
    assert ending.conclude_failed_agent(failed.node, cause, "x") == 0
    assert failed.continued() == continued
    avoided = [event["excluded"] for event in failed.node.run_events() if "excluded" in event]
    assert avoided == ([excluded] if excluded else [])
    assert failed.end["signature"] == (None if cause is Cause.LOST else "x")
    assert failed.end["step"] is None, "a script has none"


def test_failed_agent_leaves_an_end_that_others_have_recorded(ended: Callable[..., Ending], slurm: Slurm) -> None:
    late = ended()
    assert ending.record_end(late.node, cause=Cause.NODE_FAILURE, step=None)
    assert ending.conclude_failed_agent(late.node, Cause.CRASHED, "x") == 1
    assert slurm.asked == []


@pytest.mark.parametrize("is_done", [False, True])
def test_snapshots_that_a_failed_agent_leaves_are_saved_unless_the_run_is_done(
    ended: Callable[..., Ending], saved: list[Any], is_done: bool
) -> None:
    failed = ended(**TRAINING)
    if is_done:
        failed.run.final_result.parent.mkdir(parents=True)
        failed.run.final_result.touch()
    memory = HeldNodeDir(failed.run.path, 0)
    assert ending.conclude_failed_agent(failed.node, Cause.CRASHED, "x") == 0
    memory.close(remove=True)
    assert failed.end["cause"] == ("completed" if is_done else "crashed")
    assert saved == ([] if is_done else [(memory.files, failed.run)])


# --- an agent that takes over ---


def take_over(survivor: Ending, *, is_member: bool = True) -> int:
    channel: Any = SimpleNamespace(
        silent_seconds=6.0, directive=SimpleNamespace(members=(0, 1, 2) if is_member else (0, 2))
    )
    return ending.take_over(survivor.node, channel, survivor.monitor)


def test_survivor_continues_the_run_in_another_job(
    ended: Callable[..., Ending], slurm: Slurm, slurm_command: Command, saved: list[Any]
) -> None:
    survivor = ended(joined(), node_rank=1, **TRAINING)
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu[01-03]|gpu01|0|N/A|N/A|{survivor.run.script}|'")
    write_events(
        survivor.run, ledger.record("node_lost", attempt=1, node="gpu01", last_heard=1.0, detail="x"),
        file="attempt-001-node-02.jsonl",
    )  # fmt: skip
    assert take_over(survivor) == 0
    end = survivor.end
    assert time.time() - 16 < end.pop("failed_at") < time.time() - 5
    assert end == {"cause": "node_failure", "step": 30, "detail": "lost contact with gpu01", "node": "gpu01"}
    lost = survivor.node.events("node_lost")[-1]
    assert (lost["node"], lost["detail"]) == ("gpu01", "lost contact with gpu01")
    assert abs(lost["last_heard"] - (lost["time"] - 6.0)) < 5
    assert saved == [(survivor.monitor.node_dir, survivor.run)]
    assert [event["excluded"] for event in survivor.node.events("resubmitted")] == [["gpu01"]]
    assert slurm.asked == ["sbatch --parsable", "scancel 7"]


@pytest.mark.parametrize(
    "queue", ["7|COMPLETING|None|gpu[01-03]|gpu01|0|N/A|N/A|{}|", "8|RUNNING|None|gpu04|gpu04|0|N/A|N/A|{}|"]
)
def test_job_that_slurm_ends_is_left_to_it(
    ended: Callable[..., Ending], slurm: Slurm, slurm_command: Command, queue: str
) -> None:
    survivor = ended(node_rank=1)
    slurm_command("squeue", f"echo '{queue.format(survivor.run.script)}'")
    ending.record_end(survivor.node, cause=Cause.NODE_FAILURE, step=None)
    assert take_over(survivor) == 0
    assert slurm.asked == []


def test_agent_that_is_cut_off_itself_leaves_the_run_alone(ended: Callable[..., Ending], slurm: Slurm) -> None:
    survivor = ended(node_rank=1)
    survivor.node.record_event("node_lost", node="gpu02", last_heard=1.0, detail="lost contact with gpu02")
    assert take_over(survivor) == 0
    assert not survivor.node.events("attempt_ended")
    assert slurm.asked == []


def test_agent_that_nobody_confirms_goes_on_after_a_while(
    ended: Callable[..., Ending], slurm: Slurm, slurm_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's controller may be away meanwhile: it is not ending the job then."""
    monkeypatch.setattr(ending, "_CONFIRM_SECONDS", 0.2)
    survivor = ended(node_rank=1)
    away = f"test -e {survivor.run.path}/asked || {{ touch {survivor.run.path}/asked; echo no answer >&2; exit 1; }}"
    slurm_command("squeue", away)
    assert take_over(survivor) == 0
    assert survivor.end["step"] is None, "a script has none"
    assert slurm.asked == ["sbatch --parsable", "scancel 7"]


def test_spare_lets_a_member_with_a_snapshot_go_first(
    ended: Callable[..., Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor, waited = ended(node_rank=1, local=True), []
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waited.append))
    assert take_over(survivor, is_member=False) == LOCAL_REQUEUE_RETURN_CODE
    assert waited == [5.0]
    assert take_over(survivor) == 0, "the end is recorded, and submitit starts one attempt"
    assert waited == [5.0]


def test_cancelled_run_without_its_head_node_ends(
    ended: Callable[..., Ending], slurm: Slurm, slurm_command: Command
) -> None:
    survivor = ended(joined(), node_rank=1)
    write_events(survivor.run, cancelled(), file=survivor.run.cancellation.name)
    for name in ("gpu01", "gpu03"):
        survivor.node.record_event("node_lost", node=name, last_heard=1.0, detail="x")
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu[01-03]|gpu01|0|N/A|N/A|{survivor.run.script}|'")
    assert take_over(survivor) == 0
    assert survivor.end["cause"] == "cancelled"
    assert slurm.asked == ["scancel 7"], "its job keeps no nodes"


def test_run_that_another_agent_has_continued_is_left_alone(
    ended: Callable[..., Ending], slurm: Slurm, slurm_command: Command
) -> None:
    survivor = ended(node_rank=1)
    slurm_command("squeue", f"echo '7|RUNNING|None|gpu[01-03]|gpu01|0|N/A|N/A|{survivor.run.script}|'")
    ending.record_end(survivor.node, cause=Cause.NODE_FAILURE, step=None)
    write_events(survivor.run, resubmitted(), file="attempt-001-node-02.jsonl")
    assert take_over(survivor) == 0
    assert slurm.asked == []


@pytest.mark.parametrize(("settings", "metrics", "step"), [({}, 5, None), (TRAINING, 5, 5), (TRAINING, None, 0)])
def test_run_whose_head_node_died_before_it_claimed_an_attempt_goes_on(
    tmp_path: Path, slurm: Slurm, settings: dict[str, Any], metrics: int | None, step: int | None
) -> None:
    survivor = Ending(tmp_path, attempt_ended(), train_started(), node_rank=1, **settings)
    if metrics:
        survivor.run.train_metrics.parent.mkdir()
        append_json_line(survivor.run.train_metrics, {"step": metrics})
    allocation = replace(survivor.node.allocation, job_id="9", node_rank=1)
    assert ending.replace_headless_job(survivor.run, survivor.node.spec, allocation, "no head") == 0
    last = [event for event in survivor.node.run_events() if event["event"] == "attempt_ended"][-1]
    assert (last["attempt"], last["cause"], last["node"], last["detail"]) == (2, "node_failure", "gpu01", "no head")
    assert last["step"] == step
    claim = [event for event in survivor.node.run_events() if event["event"] == "claimed"][-1]
    assert (claim["port"], claim["secret"]) == (0, ""), "it listens nowhere"
    [event] = [event for event in survivor.node.run_events() if event["event"] == "resubmitted"]
    assert (event["old_job_id"], event["excluded"]) == ("9", ["gpu01"])
    assert slurm.asked == ["sbatch --parsable", "scancel 9"]


# --- both ---


def test_end_is_decided_by_the_lowest_node_rank_if_it_cannot_be_recorded(
    ended: Callable[..., Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ended()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(ending.resubmit, "record_end", refuse)
    allocations = [replace(one.node.allocation, node_rank=rank) for rank in range(3)]
    found = [ending.record_end(replace(one.node, allocation=each), cause=Cause.LOST) for each in allocations]
    assert found == [True, True, False]


def test_job_that_cannot_be_ended_is_named(
    ended: Callable[..., Ending], slurm_command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = ended()
    slurm_command("scancel", "echo 'Access/permission denied' >&2; exit 1")
    ending.end_job(stuck.node)
    assert "this job has nothing left to do, and could not be ended: type scancel 7" in capsys.readouterr().out
