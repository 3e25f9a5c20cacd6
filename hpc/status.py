"""`hpc status`: a table of runs; of a single one also what interrupted it. Runs on the login node."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from hpc import cli, slurm
from hpc.errors import TorchrelayError
from hpc.rundir import RunDir
from hpc.slurm import Job
from hpc.summary import Summary, summarize

_STYLES = {"completed": "green", "running": "cyan", "pending": "yellow", "failed": "red", "cancelled": "magenta"}
_WATCH_SECONDS = 2.0
_PIPE_WIDTH = 160
_PARTS_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Status(cli.Common):
    """Show the state of runs."""

    run: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run directories or names; by default all below --runs-dir."""
    runs_dir: Path = Path("runs")
    """Directory of the runs."""
    watch: bool = False
    """Keep the table up to date until Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(status, Status, argv, "status")


def status(options: Status) -> int:
    """Print the table, or the contract's JSON."""
    runs = [cli.find_run(name, options.runs_dir) for name in options.run] or cli.all_runs(options.runs_dir)
    if options.json:
        cli.print_json(summaries(runs))
    elif not runs:
        print(f"no runs in {options.runs_dir}: start one with hpc submit --data fashion-mnist")
    elif options.watch:
        _watch(runs, details=bool(options.run))
    else:
        print_table(summaries(runs), details=bool(options.run))
    return 0


def print_table(rows: list[Summary], *, details: bool) -> None:
    """Print the table; into a file or pipe as wide as it needs to be."""
    _print(view(rows, details=details))


def print_incidents(incidents: list[dict[str, Any]]) -> None:
    """Print what interrupted a run, and what each cost."""
    _print(incident_table(incidents))


def _print(drawn: Group | Table) -> None:
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, _PIPE_WIDTH)
    console.print(drawn)


def queue(runs: Sequence[RunDir]) -> Mapping[str, Job] | None:
    """The user's jobs, or None where there is no Slurm or it does not answer."""
    # A run without a script is this machine's alone.
    if not any(run.script.exists() for run in runs) or not slurm.available():
        return None
    try:
        return slurm.jobs()
    except TorchrelayError as error:
        print(f"Slurm does not answer, so only the run directories are asked: {error}", file=sys.stderr)
        return None


def summaries(runs: Sequence[RunDir]) -> list[Summary]:
    """One summary per run, with one call of squeue for all."""
    jobs = queue(runs)
    return [summarize(run, jobs) for run in runs]


def _watch(runs: list[RunDir], *, details: bool) -> None:
    with Live(view(summaries(runs), details=details), auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_SECONDS)
            live.update(view(summaries(runs), details=details), refresh=True)


def view(rows: list[Summary], *, details: bool) -> Group:
    """The table for people; with `details`, and a single run, what interrupted it and what to change."""
    parts: list[Table | str] = [table(rows)]
    if details and len(rows) == 1:
        parts += ["", incident_table(rows[0]["incidents"])] if rows[0]["incidents"] else []
        parts += [f"[yellow]warning:[/] {escape(warning)}" for warning in rows[0]["warnings"]]
    return Group(*parts)


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1), header_style="bold")


def incident_table(incidents: list[dict[str, Any]]) -> Table:
    """What interrupted a run, the first one first, and what each cost."""
    drawn = _empty_table()
    for title in ("interrupted", "cause", "where"):
        drawn.add_column(title, no_wrap=True)
    for title in ("steps lost", "seconds"):
        drawn.add_column(title, justify="right", no_wrap=True)
    drawn.add_column("of which", overflow="fold")
    drawn.add_column("what it said", overflow="fold")
    for incident in incidents:
        drawn.add_row(*(escape(cell) for cell in _incident_cells(incident)))
    return drawn


def _incident_cells(incident: dict[str, Any]) -> list[str]:
    when = time.localtime(incident["failed_at"] or incident["noted"])
    rank = [] if incident["rank"] is None else [f"rank {incident['rank']}"]
    return [
        time.strftime("%m-%d %H:%M:%S", when),
        incident["cause"],
        " ".join([*filter(None, [incident["node"]]), *rank]) or "-",
        str(incident["steps_lost"]),
        _or_dash(incident["seconds"]["total"], "{:.1f}"),
        largest_parts(incident["seconds"]) or "-",
        incident["detail"] or "-",
    ]


def largest_parts(seconds: Mapping[str, float | None]) -> str:
    """The parts of a recovery that took longest."""
    known = [(name, part) for name, part in seconds.items() if name != "total" and part]
    longest = sorted(known, key=lambda part: -part[1])[:_PARTS_SHOWN]
    return ", ".join(f"{name} {part:.1f}" for name, part in longest)


def table(rows: list[Summary]) -> Table:
    """The runs, one a line."""
    drawn = _empty_table()
    drawn.add_column("run", overflow="fold", min_width=8)
    drawn.add_column("state", overflow="fold", min_width=9)
    drawn.add_column("nodes", overflow="fold", min_width=5)
    drawn.add_column("restarts", overflow="fold", min_width=7)
    for title in ("try", "epoch", "step", "img/s", "loss", "accuracy", "ETA"):
        drawn.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(*_cells(row), style=None)
    return drawn


def _cells(row: Summary) -> list[str]:
    state = f"[{_STYLES[row['state']]}]{row['state']}[/]" + (
        f" ({row['reason']})" if row["reason"] not in {None, "None"} else ""
    )
    nodes = row["attempts"][-1]["members"] if row["attempts"] else []
    steps = _or_dash(row["step"]) + (f"/{row['total_steps']}" if row["step"] and row["total_steps"] else "")
    return [
        escape(row["run"]),
        state,
        " ".join(dict.fromkeys(nodes)) or "-",
        restarts(row),
        _or_dash(row["attempt"]),
        _or_dash(row["epoch"]),
        steps,
        _or_dash(row["images_per_second"], "{:.0f}"),
        _or_dash(row["train_loss"], "{:.4f}"),
        _accuracy(row),
        _duration(row["eta_seconds"]),
    ]


def _accuracy(row: Summary) -> str:
    """On the test set, once it is known; until then in validation."""
    if row["test_accuracy"] is not None:
        return f"{row['test_accuracy']:.2%}"
    return "-" if row["val_accuracy"] is None else f"{row['val_accuracy']:.1%} val"


def restarts(row: Summary) -> str:
    """How often the run was interrupted, by cause."""
    return ", ".join(f"{cost['count']} {cause}" for cause, cost in row["recovery"].items()) or "-"


def _or_dash(value: object, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


if __name__ == "__main__":
    sys.exit(main())
