"""Prints and writes the results of a scaling study so far: a table with a column for each size, and conclusions."""

import sys
from collections.abc import Callable, Sequence
from os.path import relpath
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc.base.files import write_atomic
from hpc.base.text import visible
from hpc.commands import cli
from hpc.report.writing import own_page
from hpc.status.summary import TERMINAL
from hpc.studies.scaling.measures import Measures, causes, conclusions, efficiency
from hpc.studies.scaling.scaling_dir import ScalingDir, ScalingSpec, Size
from hpc.studies.scaling.scaling_page import scaling_page

_ROWS: dict[str, Callable[[Measures], str]] = {
    "state": lambda one: one.state,
    "learning rate": lambda one: _shown(one.lr, ".3g"),
    "global batch": lambda one: _shown(one.batch_size, "d"),
    "steps per epoch": lambda one: _shown(one.steps_per_epoch, "d"),
    "seconds per epoch": lambda one: _shown(one.epoch_seconds, ".1f"),
    "epochs in the time": lambda one: _shown(one.epochs, ".2f"),
    "images per second": lambda one: _shown(one.images_per_second, ".0f"),
    "steps per second": lambda one: _shown(one.steps_per_second, ".3g"),
    "best validation loss": lambda one: _shown(one.val_loss, ".4f"),
    "test loss": lambda one: _shown(one.test_loss, ".4f"),
    "top-1": lambda one: _shown(one.test_accuracy, ".2%"),
    "waiting for all-reduce": lambda one: _shown(one.allreduce_wait_share, ".1%"),
    "waiting for data": lambda one: _shown(one.data_wait_share, ".1%"),
    "GPU-hours": lambda one: _shown(one.gpu_hours, ".3g"),
}


def rows(measured: Sequence[Measures]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: the name of a measure, and its values for all sizes."""
    share = efficiency(measured)
    found = [("ranks", [str(one.size.ranks) for one in measured])]
    found += [(name, [shown(one) for one in measured]) for name, shown in _ROWS.items()]
    place = next(i for i, (name, _) in enumerate(found) if name == "steps per second") + 1
    found.insert(place, ("scaling efficiency", [_shown(share.get(one.size), ".0%") for one in measured]))
    # Rows without values are left out: a user's script may have no epochs and no test.
    return [(name, values) for name, values in found if set(values) != {"-"}]


def write_page(study: ScalingDir, spec: ScalingSpec, measured: Sequence[Measures]) -> None:
    """Write the page, and the pages of the runs that have ended."""
    study.page.parent.mkdir(exist_ok=True)
    pages = {one.size: own_page(study.run(one.size.name)) for one in measured if one.state in TERMINAL}
    links = {size: relpath(page, study.page.parent) for size, page in pages.items() if page}
    page = scaling_page(study.path.name, spec, measured, rows(measured), conclusions(measured), links)
    write_atomic(study.page, page)


def show(study: ScalingDir, spec: ScalingSpec, measured: Sequence[Measures], *, as_json: bool) -> int:
    """Print the measures. Return 1 if the runs have ended, and no size has a measured speed."""
    share, found = efficiency(measured), conclusions(measured)
    is_failure = not share and not any(one.state in {"pending", "running"} for one in measured)
    if as_json:
        cli.print_json({
            "scaling": study.path.name, "directory": str(study.path), "mode": spec.mode, "minutes": spec.minutes,
            "sizes": [_record(one, share) for one in measured], "conclusions": found,
        })  # fmt: skip
        return int(is_failure)
    table = Table("", *(one.size.name for one in measured), box=None)
    for name, values in rows(measured):
        table.add_row(Text(name), *map(Text, values))
    Console().print(table)
    for line in (*found, *causes(measured)):
        print(visible(line))
    if study.page.exists():
        print(visible(f"  {study.page}"))
    if is_failure:
        name = study.path.name
        print(
            "hpc scaling: no run has a measured speed: each must train for some seconds, and a script must step an "
            f"optimizer of torch or report its steps; hpc status {name} shows the runs",
            file=sys.stderr,
        )
    return int(is_failure)


def _record(one: Measures, share: dict[Size, float]) -> dict[str, Any]:
    numbers = {
        name: value for name, value in vars(one).items() if name not in {"size", "run", "train_loss", "validation_loss"}
    }
    return {
        "run": one.run, "nodes": one.size.nodes, "gpus_per_node": one.size.gpus, "ranks": one.size.ranks,
        **numbers, "efficiency": share.get(one.size), "allreduce_bytes_per_second": one.bandwidth,
    }  # fmt: skip


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
