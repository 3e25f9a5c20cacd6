"""Submits scripts with sbatch, and reads its output: the job's id, a refusal, the expected start. Runs everywhere."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import TorchrelayError
from hpc.run.causes import JobState
from hpc.slurm import client
from hpc.slurm.squeue import jobs, jobs_by_script

# Prefixes that add nothing to a sentence that quotes the error.
_PREFIX = re.compile(r"(sbatch: )?(error: |fatal: )?(Batch job submission failed: |allocation failure: )?")
_ESTIMATE = re.compile(r"Job \d+ to start at (?P<time>\S+) .*on nodes (?P<nodes>\S+)")
# The reply of sbatch and, as the only line, the reply of sbatch --parsable. A site's sbatch may colour them.
_REPLY = re.compile(r"\bSubmitted batch job (\d+)\b")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
# 24.11 prints the second error if --nodelist names an excluded node.
_TOO_FEW_NODES = ("not available", "Invalid node name specified")


class NotQueuedError(TorchrelayError):
    """sbatch has queued no job."""

    def __init__(self, done: "subprocess.CompletedProcess[str]") -> None:
        if done.returncode == 0:
            printed = " ".join((done.stdout + done.stderr).split())
            super().__init__(f"sbatch ended with exit code 0, but has queued no job. It printed {printed!r}")
        else:
            super().__init__(refusal(done.stderr) or f"sbatch failed with exit code {done.returncode}")


def submit(
    script: Path, exclude: Sequence[str], environment: Mapping[str, str] | None = None, dependency: str = ""
) -> str:
    """Submit a script without a start delay, and return the job's id.

    The script's #SBATCH options hold, except --begin, --dependency and, if there are nodes to `exclude`, --exclude.
    The job has the variables of `environment`, by default those of this process.

    Raises:
        TorchrelayError: sbatch refused the script, or Slurm does not answer.
    """
    # --dependency overrides the user's --sbatch dependency=, for which the run's first job has already waited. If a job
    # in the user's dependency has failed since, the new job would never start.
    options = [
        "--parsable",
        "--begin=now",
        f"--dependency={dependency}",
        *requeue_options(),
        *exclude_option(exclude),
    ]
    try:
        return queue(script, options, environment)
    except NotQueuedError as error:
        raise client.failure(str(error)) from error


def queue(script: Path, options: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Call sbatch with a script, and return the id of the job that it queues.

    A site's sbatch may print anything beside the id, or no id, and may fail although it has queued the job. So the job
    is the one that squeue lists for this script now, and did not list before. The reply counts only if squeue lists no
    such job, for example because its answers are old.

    Raises:
        NotQueuedError: sbatch queued no job.
        TorchrelayError: sbatch or squeue does not answer, so the job may be queued.
    """
    before, unlisted = _ids_of(script)
    # The PATH of the given environment, which subprocess would search, may lack sbatch.
    command = [shutil.which("sbatch") or "sbatch", *options, str(script)]
    try:
        done = client.complete(*command, environment=environment)
        problem = refusal(done.stderr)
    except TorchrelayError as error:
        done, problem = None, str(error)
    after, still_unlisted = _ids_of(script)
    unlisted = unlisted or still_unlisted
    new = [] if unlisted else [job_id for job_id in after if job_id not in before]
    replied = replied_id(done.stdout) if done else None
    if job_id := new[-1] if new and replied not in new else replied:
        return job_id
    if done is None or unlisted:
        reasons = "; ".join(filter(None, [problem, unlisted]))
        raise TorchrelayError(
            f"sbatch failed ({reasons}), and squeue does not say whether the job is queued: when Slurm answers, type "
            f"hpc cancel {script.parent}, or sbatch {script} if there is no such job"
        )
    raise NotQueuedError(done)


def test(script: str, options: Sequence[str]) -> str:
    """Call `sbatch --test-only`, and return what it prints. Raises NotQueuedError if sbatch would refuse the script."""
    done = client.complete("sbatch", "--test-only", *options, text=script)
    if done.returncode != 0:
        raise NotQueuedError(done)
    return done.stderr


def exclude_option(nodes: Sequence[str]) -> list[str]:
    """Return the option of sbatch that excludes nodes, which are names or lists (gpu[01-03])."""
    return [f"--exclude={','.join(nodes)}"] if nodes else []


def _ids_of(script: Path) -> tuple[list[str], str]:
    """Return the ids of a script's jobs, oldest first, and why squeue does not answer; empty if it does."""
    try:
        listed = jobs_by_script(jobs().values()).get(os.path.realpath(script), [])
    except TorchrelayError as error:
        return [], str(error)
    # Slurm keeps records of some refused jobs.
    return [job.job_id for job in listed if (job.state, job.reason) != (JobState.FAILED, "BadConstraints")], ""


def requeue_options() -> list[str]:
    """Return the sbatch option for requeues without a delay, if the cluster's Slurm (since 25.11) allows them."""
    try:
        # Where such requeues are not allowed, Slurm refuses a job with this option.
        return ["--requeue=expedite"] if client.expedites_requeues(client.show_config()) else []
    except TorchrelayError:
        return []  # sbatch will say what is wrong


@dataclass(frozen=True, kw_only=True)
class StartEstimate:
    """The time and the nodes with which Slurm expects to start a job."""

    time: str
    """ISO 8601, in the user's time zone."""
    nodes: str


def replied_id(printed: str) -> str | None:
    """Return the id of the queued job from the output of sbatch; None if that names no job or several."""
    text = _COLOUR.sub("", printed).strip()
    alone = _PARSABLE.fullmatch(text)
    ids = {alone[1]} if alone else {*_REPLY.findall(text)}
    return ids.pop() if len(ids) == 1 else None


def parse_estimate(printed: str) -> StartEstimate | None:
    """Return the estimate in the output of `sbatch --test-only`; None if sbatch printed none."""
    match = _ESTIMATE.search(printed)
    return StartEstimate(time=match["time"], nodes=match["nodes"]) if match else None


def refusal(printed: str) -> str:
    """Return why sbatch refuses a job: all its errors, in one line. The first is the most exact.

    A site's job_submit plugin may print other lines before the errors, and sbatch may print a hint after them.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip() and not line.startswith("Try ")]
    errors = [line for line in lines if "error:" in line or "failure:" in line] or lines[:1]
    return "; ".join(dict.fromkeys(_PREFIX.sub("", line, count=1) for line in errors))


def lacks_nodes(refused: str) -> bool:
    """Return whether sbatch may have refused a job only because --exclude leaves too few nodes.

    With a constraint or a kind of GPU, fewer nodes fit than `bad_nodes.nodes_to_exclude` counted in the partition; and
    --sbatch nodelist may name an excluded node.
    """
    return any(words in refused for words in _TOO_FEW_NODES)
