"""The head of a run's page: the run's origin and its cost. Runs on the login node."""

import os
from typing import Any

from hpc.base.text import few
from hpc.report.formats import duration
from hpc.report.gather import RunRecord
from hpc.run.code_files import CodeFiles
from hpc.run.events.kinds import Preflight, Software
from hpc.run.events.timeline import GPU_PARTS, gpu_hours
from hpc.status.cells import is_on_cpu

_COMMIT_DIGITS = 12
_COLORS = dict(zip(GPU_PARTS, ("s3", "outside", "failure", "s8", "s1", "shade"), strict=True))
_NO_REPOSITORY = "in no git repository"


def provenance(record: RunRecord) -> list[tuple[str, str]]:
    """Return the code, software, hardware and jobs of a run, as names and values, without the unknown ones."""
    newest = record.history.last(Software) or Software()
    checked = record.history.of(Preflight)
    commit, _, dirty = (record.revision or _NO_REPOSITORY).partition("+")
    short = commit[:_COMMIT_DIGITS] if record.revision else commit
    attempts = record.summary.attempts
    jobs = [each.job_id for each in attempts] or [str(record.summary.job_id or "")]
    nodes = [node for each in attempts for node in each.nodes]
    found = {
        "Code": short + (f"+{dirty}" if dirty else ""),
        "Recipe": _recipe(record),
        "torch": newest.torch,
        "CUDA": newest.cuda,
        "Driver": newest.driver,
        "Device": " and ".join(dict.fromkeys(event.device or "" for event in checked)),
        "Jobs": few(list(dict.fromkeys(jobs))),
        "Nodes": few(sorted(set(nodes))),
    }
    return [(name, str(value)) for name, value in found.items() if value]


def _recipe(record: RunRecord) -> str | None:
    return record.spec.training.recipe if record.spec and record.spec.training else None


def how_to_get_the_code(record: RunRecord) -> str:
    """Return a sentence about the commit, directory and recipe of a run, for readers who want to repeat the run."""
    commit, _, dirty = (record.revision or "").partition("+")
    named = _recipe(record)
    recipe = f"its flags are based on recipe {named}" if named else ""
    code = f"check out commit {commit} first" if commit else "its code was in no git repository"
    changed = ", with changes that were not committed" if dirty else ""
    files = CodeFiles.load(record.run.code)
    below = record.spec.working_directory if record.spec else "."
    below = os.path.relpath(below, files.top if files else ".")
    place = "" if below == "." else f"type the command in the directory {below} of the repository"
    return "; ".join(filter(None, [f"{code[0].upper()}{code[1:]}{changed}", place, recipe])) + "."


def cost(record: RunRecord, now: float) -> dict[str, Any]:
    """Return a run's time in the queue, and its GPU-hours: unit, sum, and parts with colors. None means unknown."""
    periods = record.periods(now)
    gpus = record.spec.resources.gpus_per_node.count if record.spec else 0
    # A node without GPUs has one rank.
    hours = gpu_hours(record.history, periods, gpus or 1, record.last_logged, record.summary.steps_lost)
    waits = [period.seconds for period in periods if period.kind == "queue"]
    return {
        "queue": duration(sum(waits)) if waits else None,
        "unit": ("rank-hours" if is_on_cpu(record.summary) else "GPU-hours") if gpus else "node-hours",
        "hours": sum(hours.values()) if hours else None,
        "parts": [(part, value, _COLORS[part]) for part, value in hours.items()],
    }
