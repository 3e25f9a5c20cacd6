"""`hpc sync`: send the metrics of runs to Weights & Biases or MLflow, from the login node.

It is for nodes without internet, and for runs without --tracker. It sends only the points that the tracker lacks.
"""

import sys
import time
from collections.abc import Iterator
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
    wanted = list[tuple[RunDir, Service]]()
    for run in dict.fromkeys(cli.find_own_run(name, options.runs_dir) for name in options.run):
        services = tuple(dict.fromkeys(options.tracker)) or RunSpec.load(run).tracker
        if not services:
            raise UserError(f"run {run.name} was submitted without --tracker: add --tracker wandb or --tracker mlflow")
        wanted += [(run, service) for service in services]
    answers = [
        {"run": run.name, "run_dir": str(run.path), "tracker": service, "url": None, "points": 0, "problem": None}
        for run, service in wanted
    ]
    sending = [_sync(*one, options, answer) for one, answer in zip(wanted, answers, strict=True)]
    for one in sending:
        next(one, None)  # opens its tracker
    while sending := [one for one in sending if next(one, "ended") is None]:
        time.sleep(_PAUSE_SECONDS)
    if options.json:
        cli.print_json(answers)
    return int(any(answer["problem"] is not None for answer in answers))


def _sync(run: RunDir, service: Service, options: SyncOptions, answer: dict[str, Any]) -> Iterator[None]:
    """Send the metrics of a run to a tracker, complete the answer, and print the result.

    Yields when the tracker is open, and each time that all points are sent and --watch expects more, so that several
    runs take turns. Raises UserError if the tracker cannot be used.
    """
    cache = StatusCache()
    summary = cache.summary(run)
    own = last_events(History.load(run), summary.attempt).get(service)
    try:
        if summary.state == "running" and isinstance(own, Tracking):
            text, answer["url"] = "its node sends its metrics", own.url
        else:
            tracker = tracker_of(service)(run, RunSpec.load(run))
            answer["url"] = tracker.url
            yield
            answer["points"] += send_new(run, tracker)
            while options.watch and summary.state not in TERMINAL:
                yield
                summary = cache.summary(run)
                answer["points"] += send_new(run, tracker)
            tracker.close(cast("Outcome", summary.state) if summary.state in TERMINAL else None)
            text = f"sent {answer['points']:,} points"
    except UserError:
        raise
    except TorchrelayError as error:
        answer["problem"] = text = str(error)
    if not options.json:
        to = f" to {TITLES[service]}: {answer['url']}" if answer["problem"] is None else ""
        output = sys.stderr if answer["problem"] else sys.stdout
        print(visible(f"{run.name}: {text}{to}"), file=output, flush=True)


main = partial(cli.run, sync, SyncOptions, "sync")
