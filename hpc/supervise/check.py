"""One check of all runs: observes each, decides, acts, and sends the messages that are due. Runs on the login node."""

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import expanded, modified, storage_time
from hpc.base.flags import Flag
from hpc.base.text import visible
from hpc.base.units import Duration
from hpc.commands import cli
from hpc.run.causes import JobState
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.services.notification.delivery import is_due, run_delivery
from hpc.slurm import bad_nodes, squeue
from hpc.slurm import client as slurm
from hpc.slurm.squeue import jobs_by_script
from hpc.supervise.decide import Action, Decision, decide
from hpc.supervise.observe import RunObservation, observe, with_final_states
from hpc.supervise.perform import perform

# A run that ended longer ago, perhaps before a supervisor was started, causes no message.
_NEWS_SECONDS = 3600.0
# A silent run gets time for two heartbeats of an agent, with a margin.
_CONFIRM_SECONDS = 12.0
Line = dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class SuperviseOptions(cli.RunsOptions):
    """Watch the queue and restart runs sooner: end requeue delays, and resubmit runs that lost their job or nodes."""

    once: bool = False
    """Check all runs once and exit: for cron."""
    interval: Annotated[Duration, Flag(metavar="TIME")] = Duration(10)
    """Time between two checks."""
    dry_run: bool = False
    """Print what hpc supervise would do with each run, and why, without doing it."""


def check_runs(options: SuperviseOptions) -> list[Line]:
    """Decide about each run, and act on it. Returns a --json line per run. Raises TorchrelayError if squeue fails."""
    return [
        {
            "run": one.run.name,
            "run_dir": str(one.run.path),
            "action": decision.action,
            "reason": decision.reason,
            "job_id": decision.job_id,
            "problem": None if options.dry_run else _act(one, decision),
        }
        for one, decision in _decisions(options)
    ]


def _decisions(options: SuperviseOptions) -> list[tuple[RunObservation, Decision]]:
    """Return the decision about every run. A silent run gets time for another heartbeat before it is resubmitted."""
    found = [(one, decide(one)) for one in _observed(options.runs_dir)]
    silent = {one.run for one, decision in found if decision.action is Action.RESUBMIT and decision.job_id}
    if silent and not options.dry_run:
        # The run may be alive: a clock may be wrong, or recovering storage may return on this machine first.
        time.sleep(_CONFIRM_SECONDS)
    alive = {one.run for one, _ in found if one.run in silent and modified(one.run.alive) != one.heartbeat_mtime}
    keep = Decision(reason="its agents send heartbeats again")
    return [(one, keep if one.run in alive else decision) for one, decision in found]


def _observed(runs_dir: Path) -> list[RunObservation]:
    """Return observations of this user's Slurm runs in a directory. Damaged runs and other users' runs are skipped."""
    jobs = jobs_by_script(squeue.jobs().values())
    storage_now = storage_time(expanded(runs_dir))

    def observe_own(run: RunDir) -> RunObservation | None:
        check_is_own(run)
        return observe(run, jobs, storage_now) if run.script.exists() else None  # without one, it is not on Slurm

    found = [_unless_damaged(run, partial(observe_own, run)) for run in cli.all_runs(runs_dir)]
    observed = with_final_states([one for one in found if one is not None])
    with_nodes = [_unless_damaged(one.run, partial(_with_nodes, one)) for one in observed]
    return [one for one in with_nodes if one is not None]


def _unless_damaged(run: RunDir, act: Callable[[], RunObservation | None]) -> RunObservation | None:
    """Return what `act` returns. If it raises, say why this run is skipped: it must not stop the others."""
    try:
        return act()
    except UserError as error:
        _skip(str(error))
    except Exception as error:  # noqa: BLE001 - any damage of a run
        print(visible(f"hpc supervise: {run.path}: {error!r}"), file=sys.stderr, flush=True)
    return None


def _with_nodes(one: RunObservation) -> RunObservation:
    """Add to an observation which of the run's jobs lack their first node, and which nodes its pending job excludes."""
    new = [job for job in one.running_jobs if not one.made_last_attempt(job)]
    one = replace(one, without_first_node=frozenset(job.job_id for job in new if squeue.lacks_first_node(job)))
    excluded = _excluded(one)
    if not excluded or all(job.state is not JobState.PENDING for job in one.jobs):
        return one
    spec = RunSpec.load(one.run)
    if list(excluded) == bad_nodes.typed_exclude(spec):
        return one
    # If nodes have gone down since the submission, the pending job can exclude fewer nodes.
    return replace(one, excluded=excluded, excludable=bad_nodes.nodes_to_exclude(one.run, spec))


def _excluded(one: RunObservation) -> Sequence[str]:
    """Return the nodes that the run's pending job excludes."""
    pending = one.pending_job
    if one.over or pending is None or pending.job_id in one.history.job_ids:
        return one.excluded
    # The reply of its sbatch was lost, so no event names the excluded nodes.
    nodes = slurm.show_job(pending.job_id).get("ExcNodeList", "(null)")
    return [] if nodes == "(null)" else slurm.hostnames(nodes)


@functools.cache
def _skip(reason: str) -> None:
    """Print why a run is skipped, only at the first check."""
    print(visible(f"hpc supervise: skipped: {reason}"), file=sys.stderr, flush=True)


def _act(one: RunObservation, decision: Decision) -> str | None:
    try:
        if decision.action is not Action.KEEP:
            perform(one, decision)
        _send_messages(one, decision)
    except (TorchrelayError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def _send_messages(one: RunObservation, decision: Decision) -> None:
    """Send the messages for --notify that the nodes failed to send, or whose reason only the supervisor knows."""
    # The events of complete runs are not read, so the time of the result counts.
    times = [modified(one.run.final_result)] if one.history.complete else [event.time for event in one.history.events]
    last_news = max(filter(None, times), default=None)
    if last_news is None or time.time() - last_news > _NEWS_SECONDS:
        return
    failure = decision.reason if decision.is_final and decision.state == "failed" else None
    if is_due(one.run, RunSpec.load(one.run).notification, retry=True, failure=failure):
        run_delivery(one.run, retry=True, failure=failure)
