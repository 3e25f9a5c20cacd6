"""Starts the trials of a sweep, follows them, and reports their results to Optuna. Runs on the login node.

All state is in Optuna's journal and the runs, so the controller may be killed at any moment and started again. A second
controller does no harm: only one of the two makes a run's directory, and only one tells Optuna of a trial's end.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from hpc.base.compat import running_trial
from hpc.base.errors import UserError
from hpc.base.text import few
from hpc.services.tracking.points import Point, read_points
from hpc.slurm.cancellation import cancel_run
from hpc.status.run_view import StatusCache
from hpc.status.summary import TERMINAL, Summary
from hpc.studies.members import Supervision, lacks_job, start_member
from hpc.studies.sweep.space import grid_of, read_space, settings_text, shown
from hpc.studies.sweep.sweep_dir import SweepDir, SweepSpec
from hpc.studies.sweep.sweep_result import write_result


def open_study(sweep: SweepDir, spec: SweepSpec) -> optuna.Study:
    """Return the study in the journal of a sweep; create it if needed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    samplers: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        # The sampler counts running trials as bad, so that new ones differ from them.
        "tpe": lambda: optuna.samplers.TPESampler(seed=spec.seed, constant_liar=True),
        "random": lambda: optuna.samplers.RandomSampler(seed=spec.seed),
        # Optuna's grid sampler works only inside optimize(), where it stops the study. So `step` enqueues values.
        "grid": lambda: optuna.samplers.RandomSampler(seed=spec.seed),
    }
    pruners = {"median": optuna.pruners.MedianPruner(), "none": optuna.pruners.NopPruner()}
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(sweep.journal))), study_name=sweep.path.name,
        sampler=samplers[spec.sampler](), pruner=pruners[spec.pruner], direction=spec.direction, load_if_exists=True,
    )  # fmt: skip


class SweepController:
    """Starts and follows the trials of one sweep.

    Args:
        sweep: the directory.
        spec: the spec of the sweep.
        tell: called with each message for the user.
    """

    def __init__(self, sweep: SweepDir, spec: SweepSpec, tell: Callable[[str], None]) -> None:
        self._sweep, self._spec, self._tell = sweep, spec, tell
        self.study = open_study(sweep, spec)
        self._on_page = 0
        self._cache, self._supervision = StatusCache(), Supervision(sweep, tell)

    def step(self) -> bool:
        """Follow the trials, and start further ones. Return whether the sweep is over.

        Raises:
            UserError: the first trial cannot be submitted.
            TorchrelayError: Slurm does not answer.
        """
        self._cache = StatusCache()  # in an old cache, a run that another controller just submitted may look failed
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
            # ask() writes the values to the journal before the run exists.
            asked = self.study.ask(space)
            self._start(self.study.trials[asked.number])
        self._supervision.check()
        return not self._running()

    def write_result(self) -> None:
        """Write the best trial and the page if a trial has ended since they were last written."""
        ended = sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))
        if ended == self._on_page:
            return
        write_result(self._sweep, self._spec, self.study)
        self._on_page = ended

    def _running(self) -> Sequence[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _started(self) -> int:
        return sum(trial.state != TrialState.WAITING for trial in self.study.get_trials(deepcopy=False))

    def _follow(self, trial: FrozenTrial) -> None:
        run = self._sweep.trial(trial.number)
        summary = self._cache.summary(run) if run.spec.exists() else None
        if summary is None or lacks_job(summary):
            self._start(trial)  # an earlier controller was killed before it submitted the run
            return
        state = summary.state
        metric = self._spec.metric
        values = {point.step: point.values[metric] for point in self._points(trial) if metric in point.values}
        live = running_trial(self.study, trial)
        for step in sorted(values.keys() - trial.intermediate_values.keys()):
            live.report(values[step], step)
        if state in TERMINAL:
            self._end(trial, summary, values)
        elif live.should_prune():
            cancel_run(run, state, final=True)
            self._give_up(trial, TrialState.PRUNED, "other trials were better after the same number of steps")
            self._tell(f"{run.name} is cancelled: other trials were better after the same number of steps")

    def _points(self, trial: FrozenTrial) -> Sequence[Point]:
        return read_points(self._sweep.trial(trial.number).train_metrics.parent, {})

    def _end(self, trial: FrozenTrial, summary: Summary, values: Mapping[int, float]) -> None:
        state, detail = summary.state, summary.detail or summary.reason
        name = self._sweep.trial(trial.number).name
        best = (max if self._spec.direction == "maximize" else min)(values.values(), default=None)
        if state == "completed" and best is not None:
            self.study.tell(trial.number, best, skip_if_finished=True)
            self._tell(f"{name}: {self._spec.metric} {best:.6g} with {settings_text(trial.params)}")
        else:
            cause = detail or state
            if state == "completed":
                names = {name for point in self._points(trial) for name in point.values}
                has = f"give --metric one of {few(sorted(names))}" if names else "call torchrelay.report in the script"
                cause = f"it has no {self._spec.metric}: {has}"
            self._give_up(trial, TrialState.FAIL, cause)
            self._tell(f"{name} is {state} ({cause}): {settings_text(trial.params)}")

    def _start(self, trial: FrozenTrial) -> None:
        """Submit a trial's run. If it is refused, give the trial up; for the first trial, also raise UserError."""
        spec, run = self._spec, self._sweep.trial(trial.number)
        values = {name: shown(value) for name, value in trial.params.items()}
        try:
            if start_member(self._sweep, spec, run, lambda flags: flags.with_values(values)):
                self._tell(f"{run.name} is submitted with {settings_text(trial.params)}")
        except UserError as error:
            self._give_up(trial, TrialState.FAIL, str(error))
            if trial.number == 0:
                raise
            self._tell(f"{run.name} cannot be submitted with {settings_text(trial.params)}: {error}")

    def _give_up(self, trial: FrozenTrial, state: TrialState, cause: str) -> None:
        """Tell Optuna that a trial has no result, and store the cause for the page."""
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another controller ended the trial first
            running_trial(self.study, trial).set_user_attr("cause", cause)
        self.study.tell(trial.number, state=state, skip_if_finished=True)
