"""`hpc supervise`: watch squeue, and see that runs go on. Runs on the login node, as a daemon or from cron.

It keeps no state of its own: what it does follows from the queue and the run directories (`hpc.supervise.decide`),
so it may be
killed at any moment and started again. Two of them do no harm: a new job is submitted by who creates a file first.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc import cli
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import json_line, write_exclusive
from hpc.core.ledger import record
from hpc.core.outcome import JobState
from hpc.core.units import duration_seconds
from hpc.slurm import client as slurm
from hpc.slurm import relaunch
from hpc.slurm.squeue import jobs_by_script
from hpc.spec import RunSpec
from hpc.supervise.decide import decide
from hpc.supervise.decision import STARTS, Action, Decision
from hpc.supervise.observe import ObservedRun, look, modified, storage_time
from hpc.supervise.perform import perform

_MOST_BACK_OFF_SECONDS = 300.0
# Runs that ended longer ago, before anybody was to be told, are no news.
_NEWS_SECONDS = 3600.0
_TELL_SECONDS = 60
# Two signs of life of an agent, and a little more.
_SURE_SECONDS = 12.0


@dataclass(frozen=True, kw_only=True)
class SuperviseOptions(cli.Common):
    """Watch squeue, and see that runs go on: end Slurm's waits, submit lost runs anew, take over from dead nodes."""

    runs_dir: Path = Path("runs")
    """Directory of the runs."""
    once: bool = False
    """Look once, and leave: for cron."""
    interval: str = "10s"
    """Time between two looks."""
    dry_run: bool = False
    """Say what would be done with each run, and why, and do nothing."""
    max_parallel_requeues: int = 20
    """Start no more runs than this in one look: each stages its data."""
    on_end: str = ""
    """A command to call once when a run is complete, or is given up. It finds TORCHRELAY_RUN_DIR, TORCHRELAY_STATE and
    TORCHRELAY_REASON in its environment."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(supervise, SuperviseOptions, argv, "supervise")


def supervise(options: SuperviseOptions) -> int:
    """Look and act until Ctrl-C; or once."""
    interval = duration_seconds("--interval", options.interval)
    if interval < 1 or options.max_parallel_requeues < 1:
        raise UserError("--interval is 1s or more, --max-parallel-requeues 1 or more")
    _command(options.on_end)
    wait = float(interval)
    while True:
        try:
            told = [_told(watched, decision, problem) for watched, decision, problem in _look_and_act(options)]
            wait = float(interval)
        except (TorchrelayError, OSError) as error:
            if options.once or options.dry_run:
                raise
            wait = min(wait * 2, _MOST_BACK_OFF_SECONDS)
            told = []
            print(f"hpc supervise: looking again in {wait:.0f} s: {error}", file=sys.stderr, flush=True)
        _print(told, options)
        if options.once or options.dry_run:
            return int(any(line["problem"] for line in told))
        time.sleep(wait)


def _command(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--on-end is {text!r}: {error}") from error


def _told(watched: ObservedRun, decision: Decision, problem: str | None) -> dict[str, str | None]:
    return {
        "run": watched.run.name,
        "run_dir": str(watched.run.path),
        "action": decision.action,
        "reason": decision.reason,
        "job_id": decision.job_id,
        "problem": problem,
    }


def _print(told: list[dict[str, str | None]], options: SuperviseOptions) -> None:
    """What was done; with --dry-run what would be, and why nothing is done with the others."""
    if options.json and (options.once or options.dry_run):
        cli.print_json(told)
        return
    for line in told:
        if line["action"] == Action.KEEP and not line["problem"] and not options.dry_run:
            continue
        problem = f": {line['problem']}" if line["problem"] else ""
        text = f"{time.strftime('%F %T')} {line['run']}: {line['action']} ({line['reason']}){problem}"
        print(json.dumps(line) if options.json else text, flush=True)


def _look_and_act(options: SuperviseOptions) -> Iterator[tuple[ObservedRun, Decision, str | None]]:
    """Every run, what was decided about it, and what went wrong.

    Raises:
        TorchrelayError: squeue does not answer.
    """
    started = 0
    for watched, decision in _decided(options):
        starts, problem = decision.action in STARTS, None
        if starts and started >= options.max_parallel_requeues:
            decision = Decision(reason=f"{started} runs start at once: next time")  # noqa: PLW2901 - in its place
        elif not options.dry_run:
            problem = _act(watched, decision, options.on_end)
        started += starts and problem is None
        yield watched, decision, problem


def _decided(options: SuperviseOptions) -> list[tuple[ObservedRun, Decision]]:
    """What to do about every run. Those that seem dead get the time to give another sign of life."""
    found = [(one, decide(one.view)) for one in _watched(options.runs_dir)]
    silent = {one.run for one, decision in found if decision.action is Action.RELAUNCH and decision.job_id}
    if silent and not options.dry_run:
        # A clock may be wrong, and storage that comes back is back for this machine first.
        time.sleep(_SURE_SECONDS)
    spoke = {one.run for one, _ in found if one.run in silent and modified(one.run.alive) != one.touched}
    again = Decision(reason="its agents give signs of life again")
    return [(one, again if one.run in spoke else decision) for one, decision in found]


def _watched(runs_dir: Path) -> list[ObservedRun]:
    """All runs of Slurm's below a directory."""
    jobs = jobs_by_script(slurm.jobs().values())
    clock = storage_time(runs_dir.expanduser())
    found = []
    for run in cli.all_runs(runs_dir):
        try:
            if run.script.exists():  # a run without is this machine's alone
                found.append(look(run, jobs, clock))
        except Exception as error:  # noqa: BLE001 - a run that is damaged, in whatever way, is no reason to leave others
            print(f"hpc supervise: {run.path}: {error!r}", file=sys.stderr, flush=True)
    return [_with_affordable(one) for one in _with_fates(found)]


def _with_affordable(one: ObservedRun) -> ObservedRun:
    """Add which nodes a waiting job could do without: they get fewer when others go down."""
    waits = any(job.state is JobState.PENDING for job in one.view.jobs)
    if not one.view.excluded or not waits:
        return one
    affordable = relaunch.nodes_to_exclude(RunSpec.load(one.run), one.events)
    return replace(one, view=replace(one.view, affordable=affordable))


def _with_fates(found: list[ObservedRun]) -> list[ObservedRun]:
    """Add what Slurm's accounting knows of jobs that squeue has forgotten."""
    asked = {one.run: job_id for one in found if not one.view.over and (job_id := one.forgotten_job_id)}
    try:
        known = slurm.final_states(list(asked.values())) if asked else {}
    except TorchrelayError:
        return found  # a cluster without accounting
    fates = {run: known[job_id] for run, job_id in asked.items() if job_id in known}
    return [replace(one, view=replace(one.view, fate=fates.get(one.run, one.view.fate))) for one in found]


def _act(watched: ObservedRun, decision: Decision, on_end: str) -> str | None:
    """Do it; what went wrong, if something did."""
    try:
        if decision.action is not Action.KEEP:
            perform(watched, decision)
        elif on_end and decision.news:
            _tell(watched, decision.news, decision.reason, _command(on_end))
    except (TorchrelayError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def _tell(watched: ObservedRun, state: str, reason: str, command: list[str]) -> None:
    """Call the user's command, once, for a run that has just ended."""
    last, run = watched.view.last, watched.run
    ended = run.final_result.stat().st_mtime if watched.view.finished else (last.ended if last else None)
    marker = run.events / f"told-{state}-{last.attempt if last else 0:03d}.jsonl"
    if (ended is not None and time.time() - ended > _NEWS_SECONDS) or marker.exists():
        return
    told = {"TORCHRELAY_RUN_DIR": str(run.path), "TORCHRELAY_STATE": state, "TORCHRELAY_REASON": reason}
    if write_exclusive(marker, json_line(record("told", state=state))):
        try:
            subprocess.run(command, env={**os.environ, **told}, check=True, timeout=_TELL_SECONDS)
        except (OSError, subprocess.SubprocessError):
            marker.unlink()  # nobody was told
            raise


if __name__ == "__main__":
    sys.exit(main())
