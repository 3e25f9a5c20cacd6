"""Writes the best trial's flags and the page of a sweep so far, and prints its trials. Runs on the login node."""

from collections.abc import Sequence
from os.path import relpath
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc.base import program
from hpc.base.files import write_atomic
from hpc.base.program import changed
from hpc.base.text import visible
from hpc.commands import cli
from hpc.report.writing import own_page
from hpc.studies.members import options_of
from hpc.studies.sweep.space import settings_text, shown
from hpc.studies.sweep.sweep_dir import SweepDir, SweepSpec
from hpc.studies.sweep.sweep_page import STATES, submit_line, sweep_page
from hpc.submissions.options import submit_flags


def write_result(directory: SweepDir, spec: SweepSpec, study: optuna.Study) -> None:
    """Write the sweep's page, the pages of runs that have ended and, if a trial is complete, `best.yaml`."""
    best, trials = best_trial(study), _sorted(study)
    if best is not None:
        write_atomic(directory.best, _best_flags(directory, spec, best))
    directory.page.parent.mkdir(exist_ok=True)
    pages = {one.number: own_page(directory.trial(one.number)) for one in trials if one.state.is_finished()}
    links = {number: relpath(page, directory.page.parent) for number, page in pages.items() if page}
    write_atomic(directory.page, sweep_page(directory, spec, trials, best, links))


def _best_flags(directory: SweepDir, spec: SweepSpec, best: FrozenTrial) -> str:
    run, values = directory.trial(best.number), {name: shown(value) for name, value in best.params.items()}
    comment = f"# {run.name} of sweep {directory.path.name}: {spec.metric} {best.value:.6g}\n"
    flags = {**spec.settings, **program.values_of(options_of(spec).program.with_values(values))}
    settings = changed(flags | {"recipe": None} if "recipe" in flags else flags, submit_flags(spec.script))
    return f"{comment}# {submit_line(directory, spec, values)}\n{yaml.safe_dump(settings, sort_keys=False)}"


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """Return the best completed trial; None if there is none."""
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return study.best_trial if completed else None


def show(directory: SweepDir, spec: SweepSpec, study: optuna.Study, *, as_json: bool) -> int:
    """Print the trials, the best one first. Return 1 if no trial is completed."""
    best, trials = best_trial(study), _sorted(study)
    if as_json:
        cli.print_json({
            "sweep": directory.path.name, "directory": str(directory.path), "metric": spec.metric,
            "best": None if best is None else directory.trial(best.number).name,
            "trials": [
                {"run": directory.trial(one.number).name, "state": STATES[one.state], "value": one.value,
                 "cause": one.user_attrs.get("cause"),
                 "params": {name: shown(value) for name, value in one.params.items()}}
                for one in trials
            ],
        })  # fmt: skip
        return int(best is None)
    names = list(dict.fromkeys(name for one in trials for name in one.params))
    table = Table("trial", "state", spec.metric, *names, box=None)
    for one in trials:
        value = "-" if one.value is None else f"{one.value:.6g}"
        cells = [directory.trial(one.number).name, STATES[one.state], value]
        table.add_row(*map(Text, cells), *(Text(shown(one.params.get(name, "-"))) for name in names))
    Console().print(table)
    if best is not None:
        print(visible(f"best: {directory.trial(best.number).name} with {settings_text(best.params)}"))
        print(visible(f"  {directory.best}"))
    if directory.page.exists():
        print(visible(f"  {directory.page}"))
    return int(best is None)


def _sorted(study: optuna.Study) -> Sequence[FrozenTrial]:
    sign = -1 if study.direction is optuna.study.StudyDirection.MAXIMIZE else 1

    def key(trial: FrozenTrial) -> Any:
        completed = trial.state is TrialState.COMPLETE and trial.value is not None
        return (not completed, sign * trial.value if completed else 0.0, trial.number)  # type: ignore[operator]

    return sorted(study.get_trials(deepcopy=False), key=key)
