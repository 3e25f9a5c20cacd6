"""`hpc status`: a table of runs. Runs on the login node."""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table

from hpc import cli, slurm
from hpc.errors import TorchrelayError
from hpc.rundir import RunDir
from hpc.slurm import Job
from hpc.summary import Summary, summarize

_STYLES = {"completed": "green", "running": "cyan", "pending": "yellow", "failed": "red", "cancelled": "magenta"}
_WATCH_SECONDS = 2.0
_PIPE_WIDTH = 160


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
        _watch(runs)
    else:
        print_table(summaries(runs))
    return 0


def print_table(rows: list[Summary]) -> None:
    """Print the table; into a file or pipe as wide as it needs to be."""
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, _PIPE_WIDTH)
    console.print(table(rows))


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


def _watch(runs: list[RunDir]) -> None:
    with Live(table(summaries(runs)), auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_SECONDS)
            live.update(table(summaries(runs)), refresh=True)


def table(rows: list[Summary]) -> Table:
    """The table for people."""
    drawn = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1), header_style="bold")
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
    nodes = row["attempts"][-1]["nodes"] if row["attempts"] else []
    steps = _or_dash(row["step"]) + (f"/{row['total_steps']}" if row["step"] and row["total_steps"] else "")
    return [
        row["run"].replace("[", "\\["),
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
    causes = Counter(attempt["cause"] for attempt in row["attempts"][:-1])
    return ", ".join(f"{count} {cause or 'unknown'}" for cause, count in causes.items()) or "-"


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
