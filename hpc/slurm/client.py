"""Runs Slurm's commands and parses their output. Runs on login and compute nodes."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from hpc.base.errors import TorchrelayError

# Without an answer from slurmctld, each of Slurm's commands retries for tens of seconds.
_TIMEOUT_SECONDS = 30
_KEPT_IN_A_JOB = frozenset({"SLURM_CONF", "SLURM_JWT"})
# The commands take defaults from these variables: SQUEUE_PARTITION would hide the jobs of other partitions, and with
# SLURM_TIME_FORMAT=relative nobody can parse the times of squeue. If a user submits a script by hand, its agents have
# the variables of the user's shell.
_LEAKING = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_")
_KEPT = _KEPT_IN_A_JOB | {"SLURM_CLUSTERS"}
# The commands print and read times in the zone of TZ. In UTC no hour comes twice; the name with a number needs no
# table of zones. sbatch keeps the user's zone, for options such as --sbatch deadline= and for the job's environment.
_ZONE = {"TZ": "UTC0"}
_CLUSTER_CONFIGURATIONS = (Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf"))
_CRED_EXPIRE_SECONDS = 120
LONG_REQUEUE_DELAY_SECONDS = 15
"""If Slurm holds requeued jobs for more seconds than this, a run continues in a new job."""
TESTBED_DIRECTORY = Path("/run/torchrelay-testbed")
Fields = Mapping[str, str]


# Parts of Slurm's messages for permanent refusals (slurm_errno.c): a plugin or a limit forbids the request.
_REFUSALS = (
    "presently disabled", "permission denied", "Invalid user id", "violates accounting/QOS policy", "Invalid account",
    "Invalid qos", "Invalid partition", "not permitted to use this partition", "not supported on this system",
)  # fmt: skip


class SlurmRefusalError(TorchrelayError):
    """Slurm refuses a request for good, so a retry is useless."""


def adopt_environment(environment: MutableMapping[str, str]) -> None:
    """Remove from `environment` the variables from which Slurm's commands would take options.

    Inside a job, the job's SLURM_* and SBATCH_* would pass to a new job (SLURM_CPU_BIND would pin every rank to the
    wrong cores). Outside a job they would override our flags. (`hpc.submissions.options` reads some of them before.)
    The variables that choose the cluster stay. If no cluster is configured, SLURM_CONF is set to the running testbed's.
    """
    kept = _KEPT_IN_A_JOB if "SLURM_JOB_ID" in environment else _KEPT
    for key in [key for key in environment if key.startswith(_LEAKING)]:
        if key not in kept:
            del environment[key]
    if not is_configured(environment) and (configuration := running_slurm_conf()):
        environment["SLURM_CONF"] = str(configuration)


def running_slurm_conf() -> Path | None:
    """Return the slurm.conf of the running testbed; None if its slurmctld does not run. Reads only files."""
    try:
        pid = int((TESTBED_DIRECTORY / "run" / "slurmctld.pid").read_text())
        _, name, state, *_ = Path(f"/proc/{pid}/stat").read_text().split()
    except (OSError, ValueError):
        return None
    slurm_conf = TESTBED_DIRECTORY / "slurm.conf"
    # After `scontrol reconfigure`, the slurmctld of 26.05 is a new process with Debian's name, (slurmctld-wlm).
    return slurm_conf if name.startswith("(slurmctld") and state != "Z" and slurm_conf.exists() else None


def is_testbed() -> bool:
    """Return whether Slurm's commands talk to this machine's testbed, whose GPUs are simulated."""
    return os.environ.get("SLURM_CONF") == str(TESTBED_DIRECTORY / "slurm.conf")


def run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises TorchrelayError if it is not installed, fails, or times out."""
    done = complete(*command, environment=environment)
    if done.returncode != 0:
        raise failure(first_error(done.stderr) or f"{command[0]} failed with exit code {done.returncode}")
    return done.stdout


def failure(problem: str) -> TorchrelayError:
    """Return the error to raise for a command's message: a SlurmRefusalError if a retry is useless."""
    return (SlurmRefusalError if any(words in problem for words in _REFUSALS) else TorchrelayError)(problem)


def complete(
    *command: str, environment: Mapping[str, str] | None = None, text: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command, which may fail, with `text` as input. Raises TorchrelayError if it is missing or times out.

    All commands but sbatch print times in UTC.
    """
    own = dict(os.environ if environment is None else environment)
    adopt_environment(own)
    own |= {} if Path(command[0]).name == "sbatch" else _ZONE
    # A requeue sends SIGTERM to all processes of the job. It must not kill the scontrol with which an agent excludes
    # nodes, so the command inherits a blocked SIGTERM. This process gets the signal in another thread, or afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.run(
            command, env=own, input=text, capture_output=True, check=False, timeout=_TIMEOUT_SECONDS,
            # The path of another job's script may have any bytes, whatever the locale.
            encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors(),
        )  # fmt: skip
    except FileNotFoundError as error:
        raise TorchrelayError(f"{command[0]} is not on the PATH: is this a node of a Slurm cluster?") from error
    except subprocess.TimeoutExpired as error:
        raise TorchrelayError(f"{command[0]} did not answer within {_TIMEOUT_SECONDS} s: is slurmctld down?") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_srun(command: Sequence[str]) -> str:
    """Run srun without a time limit, and return the output of its tasks, whether or not they succeeded.

    The user sees srun's messages, for example that it waits in the queue, and can end it with Ctrl-C.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        return process.communicate()[0]


def first_error(stderr: str) -> str:
    """Return the last line of stderr that names an error or, without one, the last line; empty without lines."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # After an option that is unknown or lacks its value, the last line that Slurm prints is `Try "..."`.
    lines = [line for line in lines if not line.startswith('Try "')]
    errors = [line for line in lines if "error" in line.lower() or "unable" in line.lower()]
    return (errors or lines or [""])[-1]


def is_configured(environment: Mapping[str, str]) -> bool:
    """Return whether a cluster is configured by SLURM_CONF or in the usual files."""
    return "SLURM_CONF" in environment or any(path.exists() for path in _CLUSTER_CONFIGURATIONS)


def why_unavailable() -> str | None:
    """Return why Slurm's commands cannot be used here; None if they are installed and configured."""
    if shutil.which("sbatch") is None:
        return "sbatch is not on the PATH"
    if is_configured(os.environ):
        return None
    # The commands may also get the configuration from DNS, or from a compiled-in path.
    try:
        run("scontrol", "show", "config")
    except TorchrelayError:
        return "sbatch finds no slurm.conf"
    return None


def show_job(job_id: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`; empty if Slurm has forgotten the job."""
    try:
        return parse_fields(run("scontrol", "--oneliner", "show", "job", job_id))
    except TorchrelayError as error:
        if "Invalid job id" in str(error):
            return {}
        raise


def show_partition(name: str) -> dict[str, str]:
    """Return the fields of `scontrol show partition`."""
    return parse_fields(run("scontrol", "--oneliner", "show", "partition", name))


def grace_seconds(partition: Fields, config: Fields) -> int | None:
    """Return the seconds from SIGTERM to SIGKILL on preemption, by the fields of a partition and of the configuration.

    Returns None if preemption neither cancels nor requeues the jobs of the partition, or if the fields do not tell.
    """
    # Since 25.05, the mode may be PRIORITY,REQUEUE. The modes SUSPEND and OFF end no job.
    if {"CANCEL", "REQUEUE"}.isdisjoint(partition.get("PreemptMode", "").split(",")):
        return None
    # If GraceTime is 0, the default, KillWait applies as for every ending job.
    return leading_number(partition, "GraceTime") or leading_number(config, "KillWait") or None


def leading_number(fields: Fields, name: str) -> int | None:
    """Return the number with which a field begins (`30 sec`); None if the field begins with no number or is missing."""
    match = re.match(r"\d+", fields.get(name, ""))
    return int(match[0]) if match else None


def parse_fields(text: str) -> dict[str, str]:
    """Parse a line `Name=value Name=value`. A value may contain spaces: it ends where the next name begins."""
    return {match[1]: match[2] for match in re.finditer(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", text)}


def release(job_id: str) -> None:
    """Release a held job."""
    run("scontrol", "release", job_id)


def hostnames(nodes: str) -> list[str]:
    """Return the names in a list of nodes such as gpu[01-03]."""
    return run("scontrol", "show", "hostnames", nodes).split()


def requeue(job_id: str) -> None:
    """Requeue a job: Slurm ends its processes, and the job keeps its id."""
    run("scontrol", "requeue", job_id)


def requeue_held(job_id: str) -> None:
    """Requeue a job, and hold it in the queue until `release`."""
    run("scontrol", "requeuehold", job_id)


def update(job_id: str, **fields: str) -> None:
    """Set fields of a job, such as `ExcNodeList="gpu01"`. Slurm allows most of them only while the job is pending."""
    run("scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in fields.items()))


def cancel(job_id: str) -> None:
    """Cancel a job. Does nothing if the job has already ended."""
    try:
        run("scancel", job_id)
    except TorchrelayError as error:
        if "Invalid job id" not in str(error):
            raise


def expedites_requeues(config: Fields) -> bool:
    """Return whether Slurm's configuration allows requeues without a delay."""
    return "enable_expedited_requeue" in config.get("SlurmctldParameters", "")


def requeue_delay_seconds(config: Fields) -> int:
    """Return the seconds for which Slurm, with this configuration, holds a requeued job.

    The delay is `requeue_delay` (since Slurm 25.11) or, if that is not set, the time for which credentials are valid.
    """
    delay = re.search(r"\brequeue_delay=(\d+)", config.get("SchedulerParameters", "")) or re.search(
        r"\bcred_expire=(\d+)", config.get("AuthInfo", "")
    )
    return int(delay[1]) if delay else _CRED_EXPIRE_SECONDS


@functools.cache
def makes_job_directories() -> bool:
    """Return whether job_container/tmpfs gives each job private directories.

    If so, a requeued job must not start before Slurm's delay is over: slurmd does not make the directories again on
    nodes that still remember the job's last start, and the job fails (seen on 22.05.8). 26.05.5 makes them again, and
    calls the setting NamespaceType.
    """
    return show_config().get("JobContainerType") == "job_container/tmpfs"


def show_config() -> dict[str, str]:
    """Return the fields of `scontrol show config`."""
    return parse_config(run("scontrol", "show", "config"))


def parse_config(text: str) -> dict[str, str]:
    """Parse the lines `Name = value` of `scontrol show config`. If a name is repeated, its first value counts."""
    fields = dict[str, str]()
    for match in re.finditer(r"^(\S+) *= *(.*?) *$", text, re.MULTILINE):
        fields.setdefault(match[1], match[2])
    return fields


def parse_records(text: str) -> tuple[dict[str, str], ...]:
    """Parse the output of `scontrol --oneliner show`: one record per line."""
    return tuple(parse_fields(line) for line in text.splitlines() if "=" in line)
