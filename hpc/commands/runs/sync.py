"""`hpc sync`: send the metrics of runs to Weights & Biases or MLflow, from the login node.

It is for nodes without internet, and for runs without --tracker. It sends only the points that the tracker lacks.
"""

import sys
import time
from collections.abc import Sequence
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
from hpc.services.tracking.sender import last_events, send_new
from hpc.services.tracking.tracker import TITLES, open_tracker
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL, Summary

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
    runs = [cli.find_own_run(name, options.runs_dir) for name in options.run]
    wanted = [(run, service) for run in runs for service in _services(run, options.tracker)]
    cache = StatusCache()
    answers = [_sync(run, service, cache, options) for run, service in wanted]
    if options.json:
        cli.print_json(answers)
    return int(any(answer["problem"] is not None for answer in answers))


def _services(run: RunDir, asked: Sequence[Service]) -> tuple[Service, ...]:
    services = tuple(dict.fromkeys(asked)) or RunSpec.load(run).tracker
    if not services:
        raise UserError(f"run {run.name} was submitted without --tracker: add --tracker wandb or --tracker mlflow")
    return services


def _sync(run: RunDir, service: Service, cache: StatusCache, options: SyncOptions) -> dict[str, Any]:
    """Send the metrics of a run to a tracker, and print the result. Raises UserError if the tracker cannot be used."""
    answer: dict[str, Any] = {
        "run": run.name, "run_dir": str(run.path), "tracker": service, "url": None, "points": 0, "problem": None,
    }  # fmt: skip
    summary = cache.summary(run)
    own = last_events(History.load(run), summary.attempt).get(service)
    if summary.state == "running" and isinstance(own, Tracking):
        text = "its node sends its metrics"
        answer["url"] = own.url
    else:
        try:
            answer |= _send(run, service, cache, summary, watch=options.watch)
            text = f"sent {answer['points']:,} points"
        except UserError:
            raise
        except TorchrelayError as error:
            answer["problem"] = text = str(error)
    if not options.json:
        to = f" to {TITLES[service]}: {answer['url']}" if answer["problem"] is None else ""
        print(visible(f"{run.name}: {text}{to}"), file=sys.stderr if answer["problem"] else sys.stdout, flush=True)
    return answer


def _send(run: RunDir, service: Service, cache: StatusCache, summary: Summary, *, watch: bool) -> dict[str, Any]:
    tracker = open_tracker(service, run, RunSpec.load(run))
    points = send_new(run, tracker)
    while watch and summary.state not in TERMINAL:
        time.sleep(_PAUSE_SECONDS)
        summary = cache.summary(run)
        points += send_new(run, tracker)
    state = summary.state
    tracker.close(cast("Outcome", state) if state in TERMINAL else None)
    return {"url": tracker.url, "points": points}


main = partial(cli.run, sync, SyncOptions, "sync")
