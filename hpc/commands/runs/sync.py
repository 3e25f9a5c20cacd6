"""`hpc sync`: send the metrics of runs to Weights & Biases or MLflow, from the login node.

It is for nodes without internet, and for runs without --tracker. It sends only the points that the tracker lacks.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.flags import REPEATABLE
from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.events.history import History, Outcome
from hpc.run.events.kinds import Tracking
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, Service
from hpc.services.tracking.opening import tracker_of
from hpc.services.tracking.sender import last_events, send_new
from hpc.services.tracking.tracker import TITLES
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL

_PAUSE_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class SyncOptions(cli.RunsOptions):
    """Send the metrics of runs to Weights & Biases or MLflow from this machine.

    For example, where the nodes have no internet:
      hpc submit --tracker wandb ...
      hpc sync RUN --watch
    """

    run: Annotated[tuple[str, ...], cli.RUNS] = ()
    """Run directories or names."""
    tracker: Annotated[tuple[Service, ...], REPEATABLE] = ()
    """Tracker to send to. Default: the trackers that the run was submitted with."""
    watch: bool = False
    """Continue sending until the runs have ended."""


def sync(options: SyncOptions) -> int:
    """Send the metrics of the runs. Returns 1 if the metrics of a run could not be sent."""
    if not options.run:
        raise UserError("no run is named: type hpc sync NAME, or several names; hpc status lists them")
    wanted = list[tuple[RunDir, Service]]()
    for run in (cli.find_own_run(name, options.runs_dir) for name in options.run):
        services = tuple(dict.fromkeys(options.tracker)) or RunSpec.load(run).tracker
        if not services:
            raise UserError(f"run {run.name} was submitted without --tracker: add --tracker wandb or --tracker mlflow")
        wanted += [(run, service) for service in services]
    answers = [_sync(run, service, options) for run, service in wanted]
    if options.json:
        cli.print_json(answers)
    return int(any(answer["problem"] is not None for answer in answers))


def _sync(run: RunDir, service: Service, options: SyncOptions) -> dict[str, Any]:
    """Send the metrics of a run to a tracker, and print the result. Raises UserError if the tracker cannot be used."""
    cache, url, points, problem = StatusCache(), None, 0, None
    summary = cache.summary(run)
    own = last_events(History.load(run), summary.attempt).get(service)
    try:
        if summary.state == "running" and isinstance(own, Tracking):
            text, url = "its node sends its metrics", own.url
        else:
            tracker = tracker_of(service)(run, RunSpec.load(run))
            points, url = send_new(run, tracker), tracker.url
            while options.watch and summary.state not in TERMINAL:
                time.sleep(_PAUSE_SECONDS)
                summary = cache.summary(run)
                points += send_new(run, tracker)
            tracker.close(cast("Outcome", summary.state) if summary.state in TERMINAL else None)
            text = f"sent {points:,} points"
    except UserError:
        raise
    except TorchrelayError as error:
        problem = text = str(error)
    if not options.json:
        to = f" to {TITLES[service]}: {url}" if problem is None else ""
        print(visible(f"{run.name}: {text}{to}"), file=sys.stderr if problem else sys.stdout, flush=True)
    return {
        "run": run.name, "run_dir": str(run.path), "tracker": service, "url": url, "points": points, "problem": problem,
    }  # fmt: skip


main = partial(cli.run, sync, SyncOptions, "sync")
