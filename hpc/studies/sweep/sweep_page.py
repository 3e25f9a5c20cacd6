"""The page of a sweep: its trials, the best one first, and the metric by each setting. Runs on the login node."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from optuna.trial import FrozenTrial, TrialState

from hpc.report.bokeh_figures import plots_by
from hpc.report.charts import Axis, Chart, Look, Series
from hpc.report.rendering import Column, render
from hpc.studies.members import options_of
from hpc.studies.sweep.space import read_space, settings_text, shown
from hpc.studies.sweep.sweep_dir import SweepDir, SweepSpec

STATES = {
    TrialState.RUNNING: "running", TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed", TrialState.WAITING: "waiting",
}  # fmt: skip


def sweep_page(
    directory: SweepDir,
    spec: SweepSpec,
    trials: Sequence[FrozenTrial],
    best: FrozenTrial | None,
    links: Mapping[int, str],
) -> str:
    """Return the HTML of the page. `trials` are in the table's order; `links` lead to the pages of their runs."""
    space = read_space(spec.param)
    rows = [
        {
            "trial": directory.trial(one.number).name, "link": links.get(one.number), "state": STATES[one.state],
            "value": one.value, "cause": one.user_attrs.get("cause"), "best": {"value": best and best.value},
            **{f"setting {name}": shown(one.params.get(name, "")) for name in space},
        }
        for one in trials
    ]  # fmt: skip
    columns: list[Column] = [
        ("trial", "trial", "run"), ("state", "state", "state"), (spec.metric, "value", "significant"),
        *((name, f"setting {name}", "wrapped") for name in space), ("cause", "cause", "words"),
    ]  # fmt: skip
    counts = Counter(STATES[one.state] for one in trials)
    headline = [", ".join(f"{count} {state}" for state, count in counts.items()), f"{spec.direction} {spec.metric}"]
    findings, shell = [], ""
    if best is not None:
        found = f"{spec.metric} {best.value:.6g} with {settings_text(best.params)}"
        findings = [f"The best trial is {directory.trial(best.number).name}: {found}."]
        shell = submit_line(directory, spec, {name: shown(value) for name, value in best.params.items()})
    return render(
        "group.html", name=directory.path.name, kind="sweep", headline=headline, findings=findings, shell=shell,
        results=[("Trials", columns, rows)], figures_title=f"{spec.metric} by setting",
        shares=(),
        plots=plots_by(
            [] if best is None else [_figure(directory, spec.metric, *one, trials, best) for one in space.items()]
        ),
    )  # fmt: skip


def submit_line(directory: SweepDir, spec: SweepSpec, values: Mapping[str, str]) -> str:
    """Return the command that submits the best trial again."""
    script = options_of(spec).program.with_values(values).script
    return shlex.join(["hpc", "submit", "--config", str(directory.best), *(["--", *script] if script else [])])


def _figure(
    directory: SweepDir, metric: str, name: str, values: Any, trials: Sequence[FrozenTrial], best: FrozenTrial
) -> tuple[Chart, Axis]:
    """Return a figure of the metric by one setting, with the trials that have a value of the metric."""
    choices = list(getattr(values, "choices", ()))
    groups = {
        ("completed", "s1"): [one for one in trials if one.state is TrialState.COMPLETE and one.number != best.number],
        ("pruned", "s8"): [one for one in trials if one.state is TrialState.PRUNED and one.value is not None],
        ("best", "s2"): [best],
    }
    series = [
        Series(
            name=title, color=color, dashes="solid", has_dots=True, has_line=False,
            points=pd.DataFrame({
                "step": [choices.index(one.params[name]) if choices else one.params[name] for one in group],
                "value": [one.value for one in group],
                "label": [f"{directory.trial(one.number).name}: {settings_text(one.params)}" for one in group],
            }),
        )
        for (title, color), group in groups.items() if group
    ]  # fmt: skip
    return Chart(look=Look(title=metric), heading=name, x=name, series=series), _axis(name, values, choices)


def _axis(name: str, values: Any, choices: Sequence[str]) -> Axis:
    """Return an axis with the range of a setting, or with a tick for each of its choices."""
    if choices:
        ticks = {float(place): choice for place, choice in enumerate(choices)}
        return Axis(name="step", label=name, limits=(-0.5, len(ticks) - 0.5), ticks=ticks)
    if getattr(values, "log", False):
        limits = (values.low / 1.2, values.high * 1.2)
        return Axis(name="step", label=f"{name} (logarithmic scale)", limits=limits, is_logarithmic=True)
    margin = 0.04 * (values.high - values.low) or 1.0
    return Axis(name="step", label=name, limits=(values.low - margin, values.high + margin))
