"""Starts the trials of a sweep, follows them, and tells Optuna. Runs on the login node.

All that it knows is in Optuna's journal and the runs: it may be killed at any moment and started again. A second one
does no harm, because one of them makes the run directory, and one tells Optuna of the trial.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from hpc import cli
from hpc.cancel import cancel_run
from hpc.core.errors import UserError
from hpc.core.rundir import RunDir
from hpc.status.run_view import TERMINAL, StatusCache
from hpc.submit.code_copy import UserCode
from hpc.submit.new_run import start_run
from hpc.submit.options import options_for
from hpc.supervise.__main__ import SuperviseOptions, check_runs
from hpc.sweep.directory import SweepDir, SweepSpec
from hpc.sweep.space import grid_of, read_space, shown
from hpc.tracking.points import read_points

_SUPERVISE_SECONDS = 60.0


def open_study(sweep: SweepDir, spec: SweepSpec) -> optuna.Study:
    """The study in the journal of a sweep, made if it is not there."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    samplers: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        # Trials that run at the same time are taken for bad ones, so that they differ.
        "tpe": lambda: optuna.samplers.TPESampler(seed=spec.seed, constant_liar=True),
        "random": lambda: optuna.samplers.RandomSampler(seed=spec.seed),
        # Optuna's own stops the study by itself, which only its optimize() allows: ask() is told the values.
        "grid": lambda: optuna.samplers.RandomSampler(seed=spec.seed),
    }
    pruners = {"median": optuna.pruners.MedianPruner(), "none": optuna.pruners.NopPruner()}
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(sweep.journal))), study_name=sweep.path.name,
        sampler=samplers[spec.sampler](), pruner=pruners[spec.pruner], direction=spec.direction, load_if_exists=True,
    )  # fmt: skip


class Controller:
    """The trials of one sweep.

    Args:
        sweep: the directory.
        spec: what is asked for.
        tell: is called with each line for people.
    """

    def __init__(self, sweep: SweepDir, spec: SweepSpec, tell: Callable[[str], None]) -> None:
        self._sweep, self._spec, self._tell = sweep, spec, tell
        self.study = open_study(sweep, spec)
        self._cache = StatusCache()
        self._supervised = 0.0

    def step(self) -> bool:
        """Follow the trials that run, and start others. Returns whether the sweep is over.

        Raises:
            UserError: the first trial cannot be submitted.
            TorchrelayError: Slurm does not answer.
        """
        for trial in self._running():
            self._follow(trial)
        if self._sweep.cancelled.exists():
            return not self._running()
        space = read_space(self._spec.param)
        grid = grid_of(space) if self._spec.sampler == "grid" else []
        trials = min(self._spec.trials, len(grid)) if grid else self._spec.trials
        while len(self._running()) < self._spec.parallel and self._started() < trials:
            if grid:
                self.study.enqueue_trial(grid[self._started()], skip_if_exists=True)
            # The values are in the journal before there is a run.
            asked = self.study.ask(space)
            self._start(self.study.trials[asked.number])
        self._supervise()
        return not self._running()

    def _running(self) -> Sequence[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _started(self) -> int:
        return sum(trial.state != TrialState.WAITING for trial in self.study.get_trials(deepcopy=False))

    def _follow(self, trial: FrozenTrial) -> None:
        run = self._sweep.trial(trial.number)
        if not run.spec.exists():
            self._start(trial)  # the controller ended before
            return
        state = self._cache.summary(run)["state"]
        values = self._values(run)
        live = Trial(self.study, trial._trial_id)  # noqa: SLF001 - Optuna has no other way back to a trial
        for step in sorted(values.keys() - trial.intermediate_values.keys()):
            live.report(values[step], step)
        if state in TERMINAL:
            self._end(trial, state, values)
        elif live.should_prune():
            cancel_run(run, state, final=True)
            self.study.tell(trial.number, state=TrialState.PRUNED, skip_if_finished=True)
            self._tell(f"{run.name} is cancelled: others were better after as many steps")

    def _values(self, run: RunDir) -> dict[int, float]:
        """The metric by step."""
        points = read_points(run.train_metrics.parent, {})
        return {point.step: point.values[self._spec.metric] for point in points if self._spec.metric in point.values}

    def _end(self, trial: FrozenTrial, state: str, values: Mapping[int, float]) -> None:
        name = self._sweep.trial(trial.number).name
        best = (max if self._spec.direction == "maximize" else min)(values.values(), default=None)
        if state == "completed" and best is not None:
            self.study.tell(trial.number, best, skip_if_finished=True)
            self._tell(f"{name}: {self._spec.metric} {best:.6g} with {settings_text(trial.params)}")
        else:
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            lacks = f", but has no {self._spec.metric}" if state == "completed" else ""
            self._tell(f"{name} is {state}{lacks}: {settings_text(trial.params)}")

    def _start(self, trial: FrozenTrial) -> None:
        """Submit the run of a trial; of the first one, an error is the user's."""
        spec, run = self._spec, self._sweep.trial(trial.number)
        values = {name: shown(value) for name, value in trial.params.items()}
        arguments = [*spec.arguments, f"--name={run.name}", f"--runs-dir={self._sweep.path}"]
        if not spec.script:
            arguments += [f"--{name}={value}" for name, value in values.items()]
        script = tuple(filled(word, values) for word in spec.script)
        code = None
        if spec.names is not None:
            entry = "" if script[:1] in {(), ("-m",)} else script[0]
            code = UserCode(
                root=self._sweep.code, names=spec.names, script=script, entry=entry, revision=spec.revision
            )  # fmt: skip
            # Where it can be checked, whatever the current directory is.
            script = (str(self._sweep.code / script[0]), *script[1:]) if script and script[0] != "-m" else script
        try:
            start_run(cli.parse(options_for(script), "submit", arguments), script, code=code)
        except UserError as error:
            if run.spec.exists():
                return  # another controller has just made it
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            if trial.number == 0:
                raise
            self._tell(f"{run.name} cannot be submitted with {settings_text(trial.params)}: {error}")
        else:
            self._tell(f"{run.name} is submitted with {settings_text(trial.params)}")

    def _supervise(self) -> None:
        """Have lost trials go on: nobody else may watch them."""
        on_slurm = any(self._sweep.trial(trial.number).script.exists() for trial in self._running())
        if on_slurm and time.monotonic() - self._supervised > _SUPERVISE_SECONDS:
            self._supervised = time.monotonic()
            for line in check_runs(SuperviseOptions(runs_dir=self._sweep.path), []):
                if line["problem"]:
                    self._tell(f"{line['run']}: {line['action']} ({line['reason']}): {line['problem']}")


def filled(word: str, values: Mapping[str, str]) -> str:
    """A word of a script's command line with the values of a trial; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def settings_text(params: Mapping[str, Any]) -> str:
    """The values of a trial for people."""
    return " ".join(f"{name}={shown(value)}" for name, value in params.items())
