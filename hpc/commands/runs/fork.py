"""`hpc fork`: submit a run that continues from another run's newest checkpoint, with other flags. Login node.

The new run is submitted as by `hpc submit`; flags that are not given keep the values of the other run. The new run has
hard links to the checkpoint and the best model: nothing writes to these files, and the other run may delete its links.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from torchrelay.checkpoint_files import STATE_VALUES, find_damage, list_checkpoints, step_of

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.files import json_line, link_files, read_json_lines, write_atomic
from hpc.base.flags import POSITIONAL, Flag
from hpc.commands import cli
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, program_of
from hpc.submissions.answer import show
from hpc.submissions.new_run import NewRun, start_run
from hpc.submissions.options import SubmitTraining
from hpc.submissions.sbatch.sbatch_advice import explain
from hpc.submissions.settings import adaptable_settings_of
from training.config.changes import refuse_on_fork
from training.config.train_config import TrainConfig

_OF_NEW_TRAININGS = ("config", "recipe")
_OF_THE_FORK = {"run", "name", "runs_dir", "tracker", "dry_run", "wait", "json", "debug"}
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class ForkOptions(SubmitTraining):
    """Submit a new run that continues from the newest checkpoint of another run, with other flags.

    Flags that you leave out have the values that they have in the other run. The metrics up to the checkpoint are
    copied into the new run as attempt 0.
    """

    run: Annotated[str, POSITIONAL]
    """Directory or name of the other run, which may still be running."""
    name: Annotated[str | None, Flag(metavar="NAME", letter="-J")] = None
    """Name of the new run, which you must give."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb."""
    inherited = {field.name for field in program.flags(ForkOptions)} - _OF_THE_FORK
    reading = cli.Reading(
        complete=options_of,
        explain=explain,
        shown=program.Help(hidden=(*_OF_NEW_TRAININGS, "help_all"), inherited=inherited),
    )
    return cli.run(lambda options: show(fork(options), options), ForkOptions, "fork", argv, reading)


def options_of(given: Mapping[str, Any]) -> ForkOptions:
    """Complete the given flags with the settings of the other run. Raises UserError if a flag is wrong."""
    name = given.get("run")
    if name is None:
        raise UserError("no run is named: type hpc fork NAME --name NEW; hpc status lists the runs")
    if "name" not in given:
        raise UserError(f"the new run has no name: type hpc fork {name} --name NEW")
    for flag in _OF_NEW_TRAININGS:
        if flag in given:
            raise UserError(f"--{flag} is only for new trainings: give the flags that change instead")
    source = cli.find_own_run(name, cli.runs_dir(given))
    spec = RunSpec.load(source)
    if spec.evaluation is not None:
        raise UserError(f"run {name} is an evaluation: fork the run that it evaluated, {spec.evaluation.source}")
    if spec.train is None:
        raise UserError(
            f"run {name} runs {program_of(spec.script)}, which keeps its own checkpoints: submit it under a new "
            "name, with its own argument for resuming from a checkpoint"
        )
    refuse_on_fork([field.name for field in fields(TrainConfig) if program.flag_name(field) in given], source.best)
    return program.build(ForkOptions, {"runs-dir": source.path.parent, **adaptable_settings_of(spec), **given})


def fork(options: ForkOptions) -> NewRun:
    """Submit a run that starts from the other run's newest intact checkpoint. Raises as `start_run`."""
    source = cli.find_own_run(options.run, options.runs_dir)
    if not list_checkpoints(source.checkpoints):
        raise UserError(
            f"run {source.name} has no checkpoint in {source.checkpoints}: wait for the first one, or type hpc submit"
        )
    return start_run(options, (), lambda run, spec: give_newest_checkpoint(source, run, spec))


def give_newest_checkpoint(source: RunDir, run: RunDir, spec: RunSpec) -> RunSpec:
    """Give a new run the newest intact checkpoint of `source`, the metrics up to it, and the best model until then.

    Returns the new run's spec, which then names the checkpoint.

    Raises:
        UserError: no checkpoint is intact, or the training would already be complete at the newest one.
    """
    tried = set[Path]()
    while path := next((path for path in list_checkpoints(source.checkpoints) if path not in tried), None):
        tried.add(path)
        copy = run.checkpoints / path.name
        # The other run, if it trains, may delete the checkpoint meanwhile: then it has a newer one.
        with suppress(FileNotFoundError):
            link_files(path, copy)
            if not find_damage(copy):
                break
        shutil.rmtree(copy, ignore_errors=True)
    else:
        raise UserError(f"run {source.name} has no intact checkpoint in {source.checkpoints}: type hpc submit")
    epochs_done = json.loads((copy / STATE_VALUES).read_bytes())["objects"]["progress"]["epoch"]
    if spec.train and epochs_done >= spec.train.epochs:
        raise UserError(
            f"--epochs is {spec.train.epochs}, but {path.name} of run {source.name} is after epoch {epochs_done}: "
            f"use --epochs {epochs_done + 1} or more"
        )
    _give_results(source, run, step_of(path))
    return spec.with_training(forked_from=str(path))


def _give_results(source: RunDir, run: RunDir, step: int) -> None:
    """Give the new run the metrics up to a step, and the best model, if it was saved no later than the step."""
    for old, new in ((source.train_metrics, run.train_metrics), (source.eval_metrics, run.eval_metrics)):
        until_then = [{**line, "attempt": 0} for line in read_json_lines(old) if line["step"] <= step]
        new.parent.mkdir(exist_ok=True)
        write_atomic(new, "".join(map(json_line, until_then)))
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):  # the other run is replacing its best model now, or has none
            if json.loads((source.best / "result.json").read_bytes())["step"] <= step:
                link_files(source.best, run.best)
            return
        shutil.rmtree(run.best, ignore_errors=True)
