"""Parses the output of sbatch: the job's id, the reason for a refusal, the expected start with --test-only. Pure."""

import re
from dataclasses import dataclass

from hpc.run.spec import RunSpec

# Prefixes that add nothing to a sentence that quotes the error.
_PREFIX = re.compile(r"(sbatch: )?(error: |fatal: )?(Batch job submission failed: |allocation failure: )?")
_ESTIMATE = re.compile(r"Job \d+ to start at (?P<time>\S+) .*on nodes (?P<nodes>\S+)")
# The reply of sbatch and, as the only line, the reply of sbatch --parsable. A site's sbatch may colour them.
_REPLY = re.compile(r"\bSubmitted batch job (\d+)\b")
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
# With this error, Slurm does not say which of the requested properties the nodes lack.
_NO_SUCH_NODES = "Requested node configuration is not available"


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


def refusal(printed: str, spec: RunSpec) -> str:
    """Return why sbatch refuses the job of a run: all its errors, in one line. The first is the most exact.

    A site's job_submit plugin may print other lines before the errors, and sbatch may print a hint after them.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip() and not line.startswith("Try ")]
    errors = [line for line in lines if "error:" in line or "failure:" in line] or lines[:1]
    reason = "; ".join(dict.fromkeys(_PREFIX.sub("", line, count=1) for line in errors))
    return f"{reason}. No nodes fit {_asked(spec)}: ask for less" if reason == _NO_SUCH_NODES else reason


def lacks_nodes(printed: str) -> bool:
    """Return whether `sbatch --test-only` may have refused a job only because too few nodes are in service."""
    return _NO_SUCH_NODES in printed


def _asked(spec: RunSpec) -> str:
    """Return the run's flags that nodes must match, as the user would type them."""
    resources = spec.resources
    names = ("partition", "nodes", "gpus_per_node", "cpus_per_gpu", "mem", "constraint", "exclude")
    given = [(name, getattr(resources, name)) for name in names] + [("sbatch", option) for option in resources.sbatch]
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given if value is not None)
