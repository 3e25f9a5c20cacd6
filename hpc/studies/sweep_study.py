"""Chooses the trials of a sweep with Optuna, and reports their results to it. Runs on the login node.

All state is in Optuna's journal and the runs. A second process does no harm: only one of the two makes a run's
directory, and only one tells Optuna of a trial's end.
"""

import math
import shlex
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from operator import attrgetter

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from hpc.base import program
from hpc.base.compat import running_trial
from hpc.base.files import write_atomic
from hpc.base.program import changed
from hpc.base.text import few, visible
from hpc.run.rundir import RunDir
from hpc.services.tracking.tracker import Point, read_points
from hpc.slurm.cancellation import cancel_run
from hpc.status.summary import Summary
from hpc.studies.group import Member, options_of
from hpc.studies.study import Results, Study
from hpc.studies.sweep_spec import SweepDir, SweepSpec, grid_of, read_space, settings_text, shown
from hpc.submissions.options import submit_flags

_STATES = {
    TrialState.RUNNING: "running", TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed", TrialState.WAITING: "waiting",
}  # fmt: skip
_WORSE = "other trials were better after the same number of steps"


def open_study(sweep: SweepDir, spec: SweepSpec) -> optuna.Study:
    """Return the study in the journal of a sweep; create it if needed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    # Optuna's grid sampler works only inside optimize(), where it stops the study: `next_member` enqueues values.
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=spec.seed)
    if spec.sampler == "tpe":
        # The sampler counts running trials as bad, so that new ones differ from them.
        sampler = optuna.samplers.TPESampler(seed=spec.seed, constant_liar=True)
    pruners = {"median": optuna.pruners.MedianPruner(), "none": optuna.pruners.NopPruner()}
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(sweep.journal))), study_name=sweep.path.name,
        sampler=sampler, pruner=pruners[spec.pruner], direction=spec.direction, load_if_exists=True,
    )  # fmt: skip


class SweepStudy(Study[SweepSpec]):
    """Starts and follows the trials of one sweep. A member's name is the number of its trial."""

    def __init__(self, group: SweepDir, spec: SweepSpec, tell: Callable[[str], None]) -> None:
        super().__init__(group, spec, tell)
        self._study = open_study(group, spec)
        self._space = read_space(spec.param)

    def begun(self) -> Sequence[Member]:
        """Return the running trials."""
        return list(map(_member, self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))))

    def next_member(self) -> Member | None:
        """Ask Optuna for a trial. It writes the values to the journal before the run exists."""
        grid = grid_of(self._space) if self.spec.sampler == "grid" else []
        started = sum(trial.state != TrialState.WAITING for trial in self._study.get_trials(deepcopy=False))
        if started >= min(self.spec.trials, len(grid) or self.spec.trials):
            return None
        if grid:
            self._study.enqueue_trial(grid[started], skip_if_exists=True)
        asked = self._study.ask(self._space)
        return _member(self._study.trials[asked.number])

    def refuse(self, member: Member, cause: str) -> None:
        """Give the trial up."""
        self._give_up(member, TrialState.FAIL, cause)

    def follow(self, member: Member, run: RunDir, summary: Summary) -> None:
        """Report the new values of the metric to Optuna, and cancel the trial if its pruner says so."""
        live = running_trial(self._study, self._trial(member))
        self._report(live, run)
        if live.should_prune():
            cancel_run(run, summary.state, final=True)
            self._give_up(member, TrialState.PRUNED, _WORSE)
            self.tell(f"{run.name} is cancelled: {_WORSE}")

    def end(self, member: Member, run: RunDir, summary: Summary) -> None:
        """Tell Optuna the trial's best value, or that it has none."""
        values = self._report(running_trial(self._study, self._trial(member)), run)
        best = (max if self.spec.direction == "maximize" else min)(values, default=None)
        if summary.state == "completed" and best is not None:
            self._study.tell(int(member.name), best, skip_if_finished=True)
            self.tell(f"{run.name}: {self.spec.metric} {best:.6g}{member.values}")
            return
        cause = summary.detail or summary.reason or summary.state
        if summary.state == "completed":
            names = {name for point in _points(run) for name in point.values}
            has = f"give --metric one of {few(sorted(names))}" if names else "call torchrelay.report in the script"
            cause = f"it has no {self.spec.metric}: {has}"
            if self.spec.metric in names:
                cause = f"{self.spec.metric} is never a finite number"
        self._give_up(member, TrialState.FAIL, cause)
        self.tell(f"{run.name} is {summary.state} ({cause}){member.values}")

    def save_result(self) -> None:
        """Write the flags of the best trial."""
        if (best := self._best()) is None:
            return
        trained = options_of(self.spec).program.with_values(_values(best))
        flags = {**self.spec.settings, **program.values_of(trained)}
        settings = changed(flags | {"recipe": None} if "recipe" in flags else flags, submit_flags(self.spec.script))
        # A value that is the default of its flag is written, too: the user's own default may be another.
        swept = {name.replace("_", "-"): value for name, value in _values(best).items()}
        settings |= {name: value for name, value in swept.items() if name in flags}
        script = ["--", *trained.script] if trained.script else []
        command = shlex.join(["hpc", "submit", "--config", str(self.group.best), *script])
        title = f"{self._name(best)} of sweep {self.group.path.name}: {self.spec.metric} {best.value:.6g}"
        comments = f"# {visible(title)}\n# {visible(command)}\n"
        write_atomic(self.group.best, comments + yaml.safe_dump(settings, sort_keys=False))

    def results(self) -> Results:
        """Return the trials, the best one first."""
        trials, best = self._sorted(), self._best()
        records = [
            {
                "run": self._name(trial), "state": _STATES[trial.state], "value": trial.value,
                "cause": trial.user_attrs.get("cause"), "params": _values(trial),
            }
            for trial in trials
        ]  # fmt: skip
        document = {"metric": self.spec.metric, "best": None if best is None else self._name(best), "trials": records}
        rows = [
            [
                self._name(trial), _STATES[trial.state], "-" if trial.value is None else f"{trial.value:.6g}",
                *(shown(trial.params.get(name, "-")) for name in self._space),
            ]
            for trial in trials
        ]  # fmt: skip
        causes = [f"{record['run']}: {record['cause']}" for record in records if record["cause"]]
        found = [f"best: {self._name(best)} with {settings_text(best.params)}", f"  {self.group.best}"] if best else []
        return Results(
            document=document,
            table=[["trial", "state", self.spec.metric, *self._space], *rows],
            sentences=[*causes, *found],
            problem=None if best is not None or self.begun() else "no trial has completed",
        )

    def _trial(self, member: Member) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[int(member.name)]

    def _name(self, trial: FrozenTrial) -> str:
        return str(self.group.run(_member(trial).name).name)

    def _report(self, live: optuna.Trial, run: RunDir) -> Collection[float]:
        """Report the finite values of the metric that Optuna lacks. Return all finite values."""
        # A trial whose first value is NaN may become good, but Optuna would prune it, and NaN would be its best value.
        points = [(point.step, point.values.get(self.spec.metric, math.nan)) for point in _points(run)]
        values = {step: value for step, value in points if math.isfinite(value)}
        for step in sorted(values.keys() - self._study.get_trials(deepcopy=False)[live.number].intermediate_values):
            live.report(values[step], step)
        return values.values()

    def _give_up(self, member: Member, state: TrialState, cause: str) -> None:
        """Tell Optuna that a trial has no result, and store the cause."""
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another process ended the trial first
            running_trial(self._study, self._trial(member)).set_user_attr("cause", cause)
        self._study.tell(int(member.name), state=state, skip_if_finished=True)

    def _best(self) -> FrozenTrial | None:
        completed = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return self._study.best_trial if completed else None

    def _sorted(self) -> Sequence[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False)
        completed = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        completed.sort(key=attrgetter("value"), reverse=self.spec.direction == "maximize")
        return [*completed, *(trial for trial in trials if trial.state is not TrialState.COMPLETE)]


def _member(trial: FrozenTrial) -> Member:
    values = _values(trial)
    return Member(
        name=f"{trial.number:03d}",
        change=lambda flags: flags.with_values(values),
        values=f" with {settings_text(trial.params)}",
    )


def _points(run: RunDir) -> Sequence[Point]:
    return read_points(run.train_metrics.parent, {})


def _values(trial: FrozenTrial) -> dict[str, str]:
    return {name: shown(value) for name, value in trial.params.items()}
