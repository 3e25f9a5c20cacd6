"""The page of a scaling study: its table, parts of a step's time, speed by ranks, losses by time. Login node."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hpc.report.bokeh_figures import plots_by
from hpc.report.charts import LOOKS, Axis, Chart, Look, Series, line_style
from hpc.report.rendering import render
from hpc.studies.scaling.measures import Curve, Measures, causes
from hpc.studies.scaling.scaling_dir import ScalingSpec, Size

# The rows about speed; the other rows are about learning.
_SPEED = (
    "ranks", "images per second", "steps per second", "scaling efficiency", "seconds per epoch",
    "waiting for all-reduce", "waiting for data", "GPU-hours",
)  # fmt: skip
_SIZE = ("size", "size", "run")


def scaling_page(
    name: str,
    spec: ScalingSpec,
    measured: Sequence[Measures],
    rows: Sequence[tuple[str, Sequence[str]]],
    conclusions: Sequence[str],
    links: Mapping[Size, str],
) -> str:
    """Return the HTML of the page; `links` lead to the pages of the runs."""
    mode = "the batch grows with the ranks" if spec.mode == "weak" else "the same batch for all"
    best = {
        "images per second": max(measured, key=lambda one: one.images_per_second or 0.0),
        "best validation loss": min(measured, key=lambda one: one.val_loss or float("inf")),
        "test loss": min(measured, key=lambda one: one.test_loss or float("inf")),
        "top-1": max(measured, key=lambda one: one.test_accuracy or 0.0),
    }
    cells = [
        {
            "size": one.size.name, "link": links.get(one.size), "state": one.state,
            **dict(zip(("color", "dashes"), line_style(number), strict=True)),
            **{title: values[number] for title, values in rows if title != "state"},
            "best": {title: values[number] for title, values in rows if best.get(title) is one},
        }
        for number, one in enumerate(measured)
    ]  # fmt: skip
    known = {title for title, _ in rows}
    speed = [_SIZE, ("state", "state", "state"), *((title, title, "digits") for title in _SPEED if title in known)]
    learning = [_SIZE, *((title, title, "digits") for title, _ in rows if title not in {"state", *_SPEED})]
    return render(
        "group.html", name=name, kind="scaling study", findings=[*conclusions, *causes(measured)],
        headline=[f"{spec.minutes:g} minutes for each size, nodes × GPUs per node", mode],  # noqa: RUF001 - times
        # The table about learning is left out if empty: a user's script may report nothing about learning.
        results=[("Speed", speed, cells), *([("Learning", learning, cells)] if learning[1:] else [])],
        shell="", shares=_shares(measured), figures_title="Curves", plots=plots_by(_figures(measured)),
    )  # fmt: skip


def _shares(measured: Sequence[Measures]) -> list[tuple[str, list[tuple[str, float, str]]]]:
    """Return the parts of a step's time for each size whose parts are known."""
    found = list[tuple[str, list[tuple[str, float, str]]]]()
    for one in measured:
        if one.data_wait_share is not None or one.allreduce_wait_share is not None:
            reduce, data = one.allreduce_wait_share or 0.0, one.data_wait_share or 0.0
            rest = max(0.0, 1 - reduce - data)
            parts = [
                ("computing", rest, "s3"),
                ("waiting for the all-reduce", reduce, "s2"),
                ("waiting for data", data, "s8"),
            ]
            found.append((one.size.name, parts))
    return found


def _figures(measured: Sequence[Measures]) -> list[tuple[Chart, Axis]]:
    known = [(number, one) for number, one in enumerate(measured) if one.speed]
    if not known:
        return []
    speeds = [(number, one, ((float(one.size.ranks), one.speed or 0.0),)) for number, one in known]
    first = known[0][1]
    per_rank = (first.speed or 0.0) / first.size.ranks
    speed = LOOKS["images_per_second"] if first.images_per_second else Look(title="Speed", from_zero=True)
    ranks = sorted({one.size.ranks for _, one in known})
    ideal = _points([(float(count), per_rank * count) for count in ranks])
    ideal_line = Series(name="ideal", color="s8", dashes="dotted", points=ideal)
    ticks = {float(count): str(count) for count in ranks}
    found = [(
        Chart(look=speed, x="ranks", series=[ideal_line, *_series(speeds)]),
        Axis(name="step", label="ranks", limits=(0.0, 1.05 * ranks[-1]), ticks=ticks),
    )]  # fmt: skip
    for title, curves in (
        ("Training loss", [(number, one, one.train_loss) for number, one in known]),
        ("Validation loss", [(number, one, one.validation_loss) for number, one in known]),
    ):
        if any(curve for *_, curve in curves):
            end = max(seconds for *_, curve in curves for seconds, _ in curve)
            look, x = Look(title=title, falls=True), "seconds of training"
            chart = Chart(look=look, x=x, series=_series(curves))
            found.append((chart, Axis(name="step", label=x, limits=(-0.02 * end, 1.02 * end))))
    return found


def _series(curves: Sequence[tuple[int, Measures, Curve]]) -> list[Series]:
    """Return a line for each size that has points, in the size's color in the table."""
    return [
        Series(name=one.size.name, color=color, dashes=dashes, points=_points(curve))
        for number, one, curve in curves
        if curve
        for color, dashes in [line_style(number)]
    ]


def _points(curve: Any) -> pd.DataFrame:
    return pd.DataFrame(list(curve), columns=["step", "value"])
