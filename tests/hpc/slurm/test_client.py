import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.cluster import Command
from support.fake_slurm import write_programs

from hpc.run.causes import JobState
from hpc.slurm import client as slurm
from hpc.slurm import job_fields, sinfo, squeue, submission
from hpc.slurm.squeue import explain_reason, parse_jobs


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:2,gpu:v100:3", {"a100": 2, "v100": 3}),
        ("gpu:2080ti:2(S:0),gpu:2080ti:2(S:1)", {"2080ti": 4}),
        ("(null)", {}),
        ("nvme:1,gpu:8(IDX:0-7)", {"": 8}),
        ("mps:gpu:100", {}),
    ],
)
def test_gpus_in_gres(gres: str, gpus: dict[str, int]) -> None:
    assert sinfo.gpus_in(gres) == gpus


def test_jobs_of_squeue() -> None:
    text = (
        "12|PENDING|BeginTime||n/a|1|2026-11-21T18:40:34|N/A|/s/a b/submit.sbatch|\n"
        "13|RUNNING|None|gpu[01-02]|gpu01|0|2026-11-21T18:40:29|2026-11-21T18:40:31|/s/x|y/submit.sbatch|\n"
        "slurm_load_jobs warning: something\n"
        "14|WEIRD|None||N/A|Unknown|N/A|(null)|\n"
        "15|PEND\n\n/submit.sbatch||||||||\n"
    )
    jobs = parse_jobs(text)
    assert list(jobs) == ["12", "13", "14"], "what is no line of a job's is passed over"
    assert jobs["12"].state is JobState.PENDING
    assert (jobs["12"].reason, jobs["12"].restarts, jobs["12"].started) == ("BeginTime", 1, None)
    assert jobs["12"].command == "/s/a b/submit.sbatch"
    assert jobs["13"].nodes == "gpu[01-02]"
    assert jobs["13"].command == "/s/x|y/submit.sbatch"
    assert jobs["13"].started == datetime(2026, 11, 21, 18, 40, 31, tzinfo=UTC).timestamp()
    assert (jobs["13"].started or 0) - (jobs["13"].eligible or 0) == 2
    assert jobs["14"].state is JobState.UNKNOWN


@pytest.mark.usefixtures("user_in_new_york")
def test_times_do_not_depend_on_the_users_settings(slurm_command: Command) -> None:
    """In New York, the hour of this job's start came twice on that day. The fake's `date` uses TZ, as squeue does."""
    second_half_past_one = int(datetime(2026, 11, 1, 6, 30, tzinfo=UTC).timestamp())
    at = f'date -d @{second_half_past_one} "+${{SLURM_TIME_FORMAT:-%Y-%m-%dT%H:%M:%S}}"'
    slurm_command("squeue", f'echo "12|RUNNING|None|gpu01|gpu01|0|N/A|$({at})|/s/submit.sbatch|"')
    assert squeue.jobs()["12"].started == second_half_past_one


def test_sbatch_reads_times_in_the_users_zone(slurm_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example those of --sbatch deadline=16:00; and the job gets this environment."""
    monkeypatch.setenv("TZ", "America/New_York")
    slurm_command("sbatch", "echo $TZ")
    assert slurm.complete("sbatch").stdout == "America/New_York\n"


def test_other_jobs_scripts_may_have_any_name(slurm_command: Command) -> None:
    slurm_command("squeue", "printf '12|RUNNING|None|gpu01|gpu01|0|N/A|N/A|/s/caf\\351/submit.sbatch|\\n'")
    assert squeue.jobs()["12"].command == os.fsdecode(b"/s/caf\xe9/submit.sbatch")


@pytest.fixture
def user_in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        patch.setenv("SLURM_TIME_FORMAT", "%H:%M")
        patch.setenv("LC_ALL", "tr_TR.UTF-8")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs of higher priority come first"),
        ("ReqNodeNotAvail, UnavailableNodes:gpu[01-03]", "nodes that it needs are down or reserved"),
        ("DependencyNeverSatisfied", "it will never start: the job that it depends on failed"),
        ("launch_failed_requeued_held", "held after a failed start: type scontrol release"),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_reason_for_pending_in_words(reason: str, words: str) -> None:
    assert explain_reason(reason) == words


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"JobState": "COMPLETING", "Restarts": "0", "Reason": "TimeLimit"}, JobState.TIMEOUT),
        ({"JobState": "COMPLETING", "Restarts": "0", "Reason": "RaisedSignal:9(Killed)"}, JobState.FAILED),
        ({}, JobState.UNKNOWN),
    ],
)
def test_state_of_a_completing_job(fields: dict[str, str], state: JobState) -> None:
    assert job_fields.ending_state(fields, restart=0) is state


@pytest.mark.parametrize(
    ("since", "preempted"), [("2026-11-21T09:00:05", True), ("2026-11-20T23:00:00", False), ("None", False)]
)
def test_preemption_of_an_earlier_start_does_not_count(since: str, preempted: bool) -> None:
    assert job_fields.is_preempted({"PreemptTime": since, "StartTime": "2026-11-21T09:00:00"}) is preempted


@pytest.mark.parametrize(
    ("limit", "least", "shortened"),
    [("00:10:00", "00:05:00", True), ("01:00:00", "00:05:00", False), ("00:10:00", "N/A", False)],
    ids=["by --time-min", "not shortened", "by scontrol update: a requeue keeps it"],
)
def test_job_whose_limit_was_shortened(limit: str, least: str, *, shortened: bool) -> None:
    assert job_fields.is_shortened({"TimeLimit": limit, "TimeMin": least}, 60) is shortened


@pytest.mark.parametrize(
    ("parameters", "options"),
    [("idle_on_node_suspend,enable_expedited_requeue", "--requeue=expedite"), ("(null)", "")],
)
def test_requeues_are_expedited_where_the_cluster_allows_it(
    slurm_command: Command, tmp_path: Path, parameters: str, options: str
) -> None:
    slurm_command("scontrol", f"echo 'SlurmctldParameters     = {parameters}'")
    slurm_command("squeue", "exit 0")  # the real one would wait for a controller
    slurm_command("sbatch", f'echo "$@" > {tmp_path}/typed; echo 8')
    assert submission.submit(tmp_path / "submit.sbatch", []) == "8"
    words = (tmp_path / "typed").read_text().split()
    assert [word for word in words if word.startswith("--requeue")] == ([options] if options else [])


# As scontrol prints it, shortened.
PARTITION = "PartitionName=gpu AllowGroups=ALL Default=YES GraceTime={grace} PreemptMode={mode} State=UP\n"


@pytest.mark.parametrize(
    ("grace", "mode", "seconds"),
    [
        ("20", "REQUEUE", 20),
        ("60", "CANCEL", 60),
        ("0", "REQUEUE", 15),
        ("0", "PRIORITY,CANCEL", 15),
        ("20", "OFF", None),
        ("20", "GANG,SUSPEND", None),
    ],
)
def test_grace_of_a_preemption(grace: str, mode: str, seconds: int | None) -> None:
    partition = slurm.parse_fields(PARTITION.format(grace=grace, mode=mode))
    assert slurm.grace_seconds(partition, {"KillWait": "15 sec"}) == seconds


@pytest.mark.parametrize(
    ("job", "kept"),
    [
        ({}, "SLURM_CLUSTERS=c\nSLURM_CONF=/x\n"),
        ({"SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "mask", "SUBMITIT_EXECUTOR": "slurm"}, "SLURM_CONF=/x\n"),
    ],
    ids=["on the login node", "in a job"],
)
def test_commands_see_only_the_variables_that_choose_the_cluster(
    job: dict[str, str], kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that is submitted by hand passes the user's formats and filters on to the agents."""
    user = {"SQUEUE_PARTITION": "debug", "SLURM_TIME_FORMAT": "relative", "SINFO_FORMAT": "%n", "SBATCH_ACCOUNT": "me"}
    for name, value in (user | job | {"SLURM_CONF": "/x", "SLURM_CLUSTERS": "c"}).items():
        monkeypatch.setenv(name, value)
    path = write_programs(tmp_path, squeue="env | grep -E '^(SLURM|SBATCH|SUBMITIT|SQUEUE|SINFO)_' | sort")
    monkeypatch.setenv("PATH", path)
    assert slurm.run("squeue") == kept


def test_commands_survive_the_sigterm_of_a_requeue() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('done')"
    assert slurm.run(sys.executable, "-c", code) == "done\n"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_final_states_of_jobs_that_squeue_has_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_programs(tmp_path, sacct="printf '7|CANCELLED by 1000\\n8|NODE_FAIL\\n9\\n'")
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    assert squeue.final_states(["7", "8", "9"]) == {"7": JobState.CANCELLED, "8": JobState.NODE_FAIL}
