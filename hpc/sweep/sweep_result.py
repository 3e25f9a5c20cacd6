"""What a sweep has found so far: a table, the best trial as a file of flags, and a page with two figures."""

import shlex
from collections.abc import Sequence
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc import cli
from hpc.core.files import write_atomic
from hpc.core.text import visible
from hpc.group.members import filled
from hpc.sweep.space import settings_text, shown
from hpc.sweep.sweep_dir import SweepDir, SweepSpec
from hpc.sweep.sweep_page import sweep_page

_STATES = {
    TrialState.RUNNING: "running", TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed", TrialState.WAITING: "waiting",
}  # fmt: skip


def write_result(directory: SweepDir, spec: SweepSpec, study: optuna.Study) -> None:
    """Write `best.yaml` and the page, if there is a completed trial."""
    best = best_trial(study)
    if best is None:
        return
    run, values = directory.trial(best.number), {name: shown(value) for name, value in best.params.items()}
    comment = f"# {run.name} of sweep {directory.path.name}: {spec.metric} {best.value:.6g}\n"
    if spec.script:
        text = f"# {shlex.join(filled(word, values) for word in spec.script)}\n"
    else:
        flags = dict(word[2:].partition("=")[::2] for word in spec.arguments) | values
        text = yaml.safe_dump({name: value or "true" for name, value in flags.items()}, sort_keys=False)
    write_atomic(directory.best, comment + text)
    directory.page.parent.mkdir(exist_ok=True)
    write_atomic(directory.page, sweep_page(directory.path.name, spec, study))


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The best completed trial; None if there is none."""
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return study.best_trial if completed else None


def show(directory: SweepDir, spec: SweepSpec, study: optuna.Study, *, as_json: bool) -> int:
    """Print the trials, the best one first. Returns 1 if none was completed."""
    best, trials = best_trial(study), _sorted(study)
    if as_json:
        cli.print_json({
            "sweep": directory.path.name, "directory": str(directory.path), "metric": spec.metric,
            "best": None if best is None else directory.trial(best.number).name,
            "trials": [
                {"run": directory.trial(one.number).name, "state": _STATES[one.state], "value": one.value,
                 "params": {name: shown(value) for name, value in one.params.items()}}
                for one in trials
            ],
        })  # fmt: skip
        return int(best is None)
    names = list(dict.fromkeys(name for one in trials for name in one.params))
    table = Table("trial", "state", spec.metric, *names, box=None)
    for one in trials:
        value = "-" if one.value is None else f"{one.value:.6g}"
        cells = [directory.trial(one.number).name, _STATES[one.state], value]
        table.add_row(*map(Text, cells), *(Text(shown(one.params.get(name, "-"))) for name in names))
    Console().print(table)
    if best is not None:
        print(visible(f"best: {directory.trial(best.number).name} with {settings_text(best.params)}"))
        print(visible(f"  {directory.best}"), visible(f"  {directory.page}"), sep="\n")
    return int(best is None)


def _sorted(study: optuna.Study) -> Sequence[FrozenTrial]:
    sign = -1 if study.direction is optuna.study.StudyDirection.MAXIMIZE else 1

    def key(trial: FrozenTrial) -> Any:
        completed = trial.state is TrialState.COMPLETE and trial.value is not None
        return (not completed, sign * trial.value if completed else 0.0, trial.number)  # type: ignore[operator]

    return sorted(study.get_trials(deepcopy=False), key=key)
