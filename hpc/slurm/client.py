"""The one module that runs Slurm's binaries, and the pure parsers of what they print.

Runs on login and compute nodes. Only squeue, sinfo, scontrol and scancel: no accounting is needed.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.core.errors import TorchrelayError, UserError
from hpc.core.outcome import JobState
from hpc.core.units import slurm_seconds
from hpc.slurm.squeue import QUEUE_FORMAT, SlurmJob, job_state, parse_jobs

# A controller that is down makes each client try for tens of seconds; nobody should wait longer for an answer.
_TIMEOUT_SECONDS = 30
_KEPT_IN_A_JOB = frozenset({"SLURM_CONF"})
# squeue and its like take defaults from there too: a SQUEUE_PARTITION would hide the jobs in all others.
_LEAKING = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_")
_KEPT = _KEPT_IN_A_JOB | {"SLURM_CLUSTERS", "SLURM_JWT", "SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION"}
_FATE_FIELDS = ("JobIDRaw", "State")
_UNUSABLE = ("down", "drain", "fail", "unknown", "inval", "maint")
_CLUSTER_CONFIGURATIONS = (Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf"))
TESTBED_DIRECTORY = Path("/run/torchrelay-testbed")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Nodes of one kind in one partition, as a line of sinfo tells it."""

    name: str
    default: bool
    up: bool
    limit_minutes: int | None
    max_nodes_per_job: int | None
    nodes: int
    cpus: int
    gpus: int


def adopt_environment(environment: MutableMapping[str, str]) -> None:
    """Make an environment fit for submitting, in place: once per process, at its edge.

    A verb that is typed inside a job would hand that job's SLURM_* and SBATCH_* on to the new one (a leaked
    SLURM_CPU_BIND pins every rank to the wrong cores). Outside of one they would win over our flags. What says which
    cluster this is, and who pays, stays. Without a cluster's configuration the running testbed's is used.
    """
    kept = _KEPT_IN_A_JOB if "SLURM_JOB_ID" in environment else _KEPT
    for key in [key for key in environment if key.startswith(_LEAKING)]:
        if key not in kept:
            del environment[key]
    if not is_configured(environment) and (configuration := running_slurm_conf()):
        environment["SLURM_CONF"] = str(configuration)


def running_slurm_conf() -> Path | None:
    """The slurm.conf of the running testbed, for SLURM_CONF; None if none is up.

    Costs two small reads, needs no root and runs no command. A killed slurmctld and what a reboot left count as
    not up: the recorded process must be a slurmctld, and no zombie, which lasts until its parent looks.
    """
    try:
        pid = int((TESTBED_DIRECTORY / "run" / "slurmctld.pid").read_text())
        _, name, state, *_ = Path(f"/proc/{pid}/stat").read_text().split()
    except (OSError, ValueError):
        return None
    slurm_conf = TESTBED_DIRECTORY / "slurm.conf"
    return slurm_conf if name == "(slurmctld)" and state != "Z" and slurm_conf.exists() else None


def _run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's binaries and return what it printed.

    Raises:
        TorchrelayError: it is not there, failed, or gave no answer.
    """
    # A requeue sends SIGTERM to all processes of the job, and so to the scontrol that is to say which nodes to avoid
    # next. A blocked signal stays blocked in a child; one that is meant for this process waits, or another thread
    # takes it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
        )
    except FileNotFoundError as error:
        raise TorchrelayError(f"{command[0]} is not on the PATH: is this a node of a Slurm cluster?") from error
    except subprocess.TimeoutExpired as error:
        raise TorchrelayError(f"{command[0]} gave no answer in {_TIMEOUT_SECONDS} s: is slurmctld down?") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if done.returncode != 0:
        raise TorchrelayError(first_error(done.stderr) or f"{command[0]} failed with exit code {done.returncode}")
    return done.stdout


def run(command: Sequence[str]) -> str:
    """Run a command that is put together elsewhere, and return what it printed; raises as all the others do."""
    return _run(*command)


def run_srun(command: Sequence[str]) -> str:
    """Run an srun, however long it waits in the queue, and return what its tasks printed, whatever became of them.

    What it complains of, and that it waits, the user reads at once. Ctrl-C reaches it as well.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        return process.communicate()[0]


def first_error(stderr: str) -> str:
    """The line of a Slurm binary's complaint that says what is wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "unable" in line.lower()]
    return (errors or lines or [""])[-1]


def is_configured(environment: Mapping[str, str]) -> bool:
    """Whether a cluster is configured in one of the usual ways, without asking it."""
    return "SLURM_CONF" in environment or any(path.exists() for path in _CLUSTER_CONFIGURATIONS)


def is_available() -> bool:
    """Whether Slurm's clients are installed and know of a cluster."""
    if shutil.which("sbatch") is None:
        return False
    if is_configured(os.environ):
        return True
    # Its configuration may come from the DNS, or lie where only the binaries know.
    try:
        _run("scontrol", "show", "config")
    except TorchrelayError:
        return False
    return True


def partitions() -> list[Partition]:
    """All partitions that the user may see, one entry per kind of node.

    Raises:
        UserError: the controller does not answer.
    """
    try:
        # Without --noconvert 1024 nodes are "1K".
        return parse_partitions(_run("sinfo", "--noconvert", "--noheader", "--format=%P|%a|%l|%s|%D|%c|%G"))
    except TorchrelayError as error:
        raise UserError(f"Slurm does not answer ({error}). Try again later, or use --cluster local") from error


def parse_partitions(text: str) -> list[Partition]:
    """Parse `sinfo --format=%P|%a|%l|%s|%D|%c|%G`."""
    found = []
    for line in text.splitlines():
        name, avail, limit, job_size, nodes, cpus, gres = line.split("|")
        seconds = slurm_seconds(limit)
        most = job_size.split("-")[-1]
        found.append(
            Partition(
                name=name.rstrip("*"),
                default=name.endswith("*"),
                up=avail == "up",
                limit_minutes=None if seconds is None else seconds // 60,
                max_nodes_per_job=int(most) if most.isdigit() else None,
                nodes=int(nodes),
                cpus=int(re.match(r"\d+", cpus)[0]),  # type: ignore[index]  # sinfo prints a number, or `8+`
                gpus=gpus_in(gres),
            )
        )
    return found


def gpus_in(gres: str) -> int:
    """GPUs in a gres text such as `gpu:a100:4(S:0-1),nvme:1`."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))


def jobs() -> dict[str, SlurmJob]:
    """All the user's jobs that Slurm holds or has not yet forgotten (MinJobAge), by id: one call of squeue."""
    # Without --all a job in a hidden partition, or in one that was closed to its user meanwhile, seems to be gone.
    return parse_jobs(_run("squeue", "--me", "--all", "--states=all", "--noheader", f"--Format={QUEUE_FORMAT}"))


def show_job(job_id: str) -> dict[str, str]:
    """What `scontrol show job` tells of one job, by its names; empty when Slurm has forgotten it."""
    try:
        return parse_fields(_run("scontrol", "--oneliner", "show", "job", job_id))
    except TorchrelayError as error:
        if "Invalid job id" in str(error):
            return {}
        raise


def show_partition(name: str) -> dict[str, str]:
    """What `scontrol show partition` tells of one partition, by its names."""
    return parse_fields(_run("scontrol", "--oneliner", "show", "partition", name))


def grace_seconds(fields: Mapping[str, str]) -> int | None:
    """Seconds between SIGTERM and SIGKILL on preemption, from `show_partition`; None if the partition does not say."""
    # With 0, the default, a job gets what every ending job gets (KillWait); SUSPEND and OFF end none.
    mode, grace = fields.get("PreemptMode"), fields.get("GraceTime", "")
    return int(grace) or None if mode in {"CANCEL", "REQUEUE"} and grace.isdigit() else None


def parse_fields(text: str) -> dict[str, str]:
    """Parse scontrol's `Name=value Name=value` of one line; a value ends where the next name begins."""
    return {match[1]: match[2] for match in re.finditer(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", text)}


def ending_state(fields: Mapping[str, str], restart: int) -> JobState:
    """How a job is ending, from `show_job`; `restart` is its restart count when the attempt began.

    While its processes end, Slurm calls a job COMPLETING, whatever became of it: a requeue shows in the count of
    restarts and a time limit in the reason, so what is left is that somebody cancelled it.
    """
    state = job_state(fields.get("JobState", ""))
    if state is not JobState.ENDING:
        return state
    if int(fields.get("Restarts", "0")) > restart:
        return JobState.PENDING
    return JobState.TIMEOUT if fields.get("Reason") == "TimeLimit" else JobState.CANCELLED


def is_preempted(fields: Mapping[str, str]) -> bool:
    """Whether this start of a job has been preempted, from `show_job`; the times are ISO 8601 of one clock."""
    since = fields.get("PreemptTime", "None")
    return since not in {"None", "N/A", ""} and since >= fields.get("StartTime", "")


def final_states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """How jobs ended that squeue has forgotten, as far as an accounting remembers them; most clusters have one.

    Raises:
        TorchrelayError: there is none, or it does not answer.
    """
    options = ("--allocations", "--noheader", "--parsable2", f"--format={','.join(_FATE_FIELDS)}")
    lines = [line.split("|") for line in _run("sacct", *options, f"--jobs={','.join(job_ids)}").splitlines()]
    return {line[0]: job_state(line[1]) for line in lines if len(line) == len(_FATE_FIELDS)}


def set_start_time(job_id: str, at: str) -> None:
    """Have a job that waits begin at some time, as Slurm writes it, if there is room."""
    _run("scontrol", "update", f"JobId={job_id}", f"StartTime={at}")


def release(job_id: str) -> None:
    """Let a job start that is held."""
    _run("scontrol", "release", job_id)


def usable_nodes(partition: str | None) -> set[str]:
    """The nodes of some partitions, or of the default one, on which jobs may start now or later."""
    lines = [line.split("|") for line in _run("sinfo", "--noheader", "--Node", "--format=%N|%P|%T").splitlines()]
    wanted = partition.split(",") if partition else [name.rstrip("*") for _, name, _ in lines if name.endswith("*")]
    return {node for node, name, state in lines if name.rstrip("*") in wanted and not state.startswith(_UNUSABLE)}


def dead_nodes(nodes: list[str]) -> list[str]:
    """Those of the nodes that Slurm calls down; of one that only does not respond it still holds the jobs."""
    # All nodes are asked for: the answer for a few may be minutes old.
    text = _run("sinfo", "--noheader", "--Node", "--format=%N|%T")
    states = dict(line.split("|") for line in text.splitlines())
    return [name for name in nodes if states.get(name, "").startswith("down")]


def submit(script: Path, exclude: Sequence[str], given: Mapping[str, str] | None = None) -> str:
    """Submit a script, as from a login node and to begin at once, and return the job's id.

    Args:
        script: whose own options hold, but for the nodes to avoid and the time to begin.
        exclude: nodes, or lists of them as Slurm writes them.
        given: the environment of the job; by default this process's.

    Raises:
        TorchrelayError: it was refused.
    """
    environment = dict(os.environ if given is None else given)
    adopt_environment(environment)
    options = ["--parsable", "--begin=now", *([f"--exclude={','.join(exclude)}"] if exclude else [])]
    # Where it is, is known by this process's PATH.
    command = [shutil.which("sbatch") or "sbatch", *options, str(script)]
    return _run(*command, environment=environment).strip().partition(";")[0]


def hostnames(nodes: str) -> list[str]:
    """The single names of a list of nodes as Slurm writes it: gpu[01-03]."""
    return _run("scontrol", "show", "hostnames", nodes).split()


def set_excluded_nodes(job_id: str, nodes: Sequence[str]) -> None:
    """Keep a job that waits from these nodes, and from no others."""
    _run("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}")


def requeue(job_id: str) -> None:
    """Put a job back into the queue: it keeps its id, and Slurm ends what is left of it."""
    _run("scontrol", "requeue", job_id)


def cancel(job_id: str) -> None:
    """End a job, or take it out of the queue; one that has ended meanwhile is left alone."""
    try:
        _run("scancel", job_id)
    except TorchrelayError as error:
        if "Invalid job id" not in str(error):
            raise
