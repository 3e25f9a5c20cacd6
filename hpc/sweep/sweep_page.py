"""The page of a sweep: the trials as lines over their settings, and how much each setting matters. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FactorRange, FixedTicker, HoverTool, LinearColorMapper, Range1d
from bokeh.models.annotations import ColorBar
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.resources import INLINE
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from hpc.sweep.space import read_space, shown
from hpc.sweep.sweep_dir import SweepSpec

# With fewer, an importance is chance.
_LEAST_TRIALS = 5
_TICKS = 5


def sweep_page(name: str, spec: SweepSpec, study: optuna.Study) -> str:
    """The HTML of the page, without anything from the network."""
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    figures = [_parallel_coordinates(name, spec, completed)]
    if len(completed) >= _LEAST_TRIALS and len(read_space(spec.param)) > 1:
        figures.append(_importances(spec, study))
    page: str = file_html(column(*figures, sizing_mode="stretch_width"), INLINE, title=f"sweep {name}")
    return page


def _parallel_coordinates(sweep: str, spec: SweepSpec, trials: Sequence[FrozenTrial]) -> figure:
    """Each trial is a line, over an axis for each parameter and one for the metric, in the color of its value."""
    names = [*read_space(spec.param), spec.metric]
    columns = {name: [trial.value if name == spec.metric else trial.params[name] for trial in trials] for name in names}
    drawn = figure(
        height=420, sizing_mode="stretch_width", x_range=Range1d(start=-0.3, end=len(names) - 0.7),
        y_range=Range1d(start=-0.08, end=1.08),
        tools="save", title=f"{len(trials)} trials",
    )  # fmt: skip
    heights = dict[str, np.ndarray[Any, Any]]()
    for place, name in enumerate(names):
        log = _is_log(spec, name)
        heights[name], ticks = _scaled(columns[name], log=log)
        drawn.line([place, place], [0, 1], color="#55606e", line_width=1)
        drawn.text(
            x=[place] * len(ticks), y=list(ticks), text=list(ticks.values()), x_offset=5, text_font_size="11px",
            text_baseline="middle", text_color="#55606e",
        )  # fmt: skip
    values = np.array(columns[spec.metric], dtype=float)
    mapper = LinearColorMapper(palette=Viridis256, low=float(values.min()), high=float(values.max()))
    source = ColumnDataSource({
        "xs": [list(range(len(names)))] * len(trials),
        "ys": [[float(heights[name][i]) for name in names] for i in range(len(trials))],
        "value": values,
        "trial": [f"{sweep}-{trial.number:03d}" for trial in trials],
        "settings": [", ".join(f"{key} {shown(value)}" for key, value in trial.params.items()) for trial in trials],
    })  # fmt: skip
    lines = drawn.multi_line(
        "xs", "ys", source=source, line_width=2, alpha=0.8, color={"field": "value", "transform": mapper}
    )
    drawn.add_tools(
        HoverTool(renderers=[lines], tooltips=[("", "@trial"), (spec.metric, "@value{0.[0000]}"), ("", "@settings")])
    )
    drawn.add_layout(ColorBar(color_mapper=mapper, title=spec.metric), "right")
    drawn.xaxis.ticker = FixedTicker(ticks=list(range(len(names))))
    drawn.xaxis.major_label_overrides = dict(enumerate(names))
    drawn.yaxis.visible = False
    drawn.grid.grid_line_color = None
    return drawn


def _is_log(spec: SweepSpec, name: str) -> bool:
    return bool(getattr(read_space(spec.param).get(name), "log", False))


def _scaled(values: Sequence[Any], *, log: bool) -> tuple["np.ndarray[Any, Any]", dict[float, str]]:
    """The heights of values on an axis from 0 to 1, and the labels of the axis by their heights."""
    if any(isinstance(value, str) for value in values):
        choices = sorted(set(values))
        place = {choice: i / max(1, len(choices) - 1) for i, choice in enumerate(choices)}
        return np.array([place[value] for value in values]), {height: choice for choice, height in place.items()}
    numbers = np.array(values, dtype=float)
    scaled = np.log10(numbers) if log else numbers
    low, high = float(scaled.min()), float(scaled.max())
    span = high - low or 1.0
    ticks = np.linspace(0.0, 1.0, _TICKS) if high > low else np.array([0.0])
    labels = {float(tick): f"{10 ** (low + tick * span) if log else low + tick * span:.3g}" for tick in ticks}
    return (scaled - low) / span, labels


def _importances(spec: SweepSpec, study: optuna.Study) -> figure:
    """How much of the differences between trials each parameter explains (PED-ANOVA)."""
    found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    names = list(found)[::-1]
    drawn = figure(
        height=80 + 40 * len(names), sizing_mode="stretch_width", y_range=FactorRange(factors=names),
        x_range=Range1d(start=0, end=1), tools="save",
        title=f"How much each setting matters for {spec.metric} (PED-ANOVA)",
    )  # fmt: skip
    drawn.hbar(y=names, right=[found[name] for name in names], height=0.6, color="#1d5fd1")
    drawn.ygrid.grid_line_color = None
    return drawn
