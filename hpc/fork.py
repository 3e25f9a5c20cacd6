"""`hpc fork`: a new run that goes on from the newest checkpoint of another one, with other flags. Login node.

The new run is submitted as by `hpc submit`, with the flags of the other one before those of the command line. It gets
the checkpoint and the best model by hard links: neither is ever written to, and the other run may delete its own.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from hpc import cli
from hpc.core import program
from hpc.core.errors import UserError
from hpc.core.files import json_line, link_files, read_json_lines, write_atomic
from hpc.core.rundir import STATE_VALUES, RunDir
from hpc.flags import flags_of, is_default_time, named_run, with_own_flags
from hpc.spec import RunSpec, program_of
from hpc.submit.__main__ import show
from hpc.submit.new_run import NewRun, start_run
from hpc.submit.options import SubmitTraining, flag_names
from hpc.submit.sbatch_flags import spelled_out
from training.config.changes import refuse_on_fork
from training.config.command_line import check_names, typed_names
from training.config.train_config import TrainConfig
from training.relay import find_damage, list_checkpoints, step_of

_OF_NEW_TRAININGS = ("config", "recipe")
_OF_THE_FORK = {"run", "name", "runs_dir", "tracker", "dry_run", "wait", "json", "debug"}
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class ForkOptions(SubmitTraining):
    """Submit a new run that continues from the newest checkpoint of another run, with other flags.

    Flags that you leave out have the values that they have in the other run. The metrics up to the checkpoint are
    copied into the new run as attempt 0.
    """

    run: tyro.conf.Positional[str]
    """Directory or name of the other run, which may still be running."""
    name: Annotated[str | None, tyro.conf.arg(aliases=("-J",), metavar="NAME")] = None
    """Name of the new run, which you must give."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    inherited = {field.name for field in program.flags(ForkOptions)} - _OF_THE_FORK
    shown = program.Help(hidden=(*_OF_NEW_TRAININGS, "help_all"), inherited=inherited)
    return cli.run(lambda parsed: show(fork(parsed), parsed), ForkOptions, "fork", argv, with_flags_of_the_run, shown)


def with_flags_of_the_run(arguments: list[str]) -> list[str]:
    """Put the flags of the other run in front of those that the user types."""
    if {"-h", "--help"}.intersection(arguments):
        return arguments
    known = flag_names(SubmitTraining)
    arguments = spelled_out(arguments, known)
    check_names(arguments, known)
    name, typed = named_run(arguments, known), typed_names(arguments)
    if name is None:
        raise UserError("no run is named: type hpc fork NAME --name NEW; hpc status lists the runs")
    if "name" not in typed:
        raise UserError(f"the new run has no name: type hpc fork {name} --name NEW")
    for flag in typed.intersection(_OF_NEW_TRAININGS):
        raise UserError(f"--{flag} is only for new trainings: give the flags that change instead")
    source = cli.find_own_run(name, cli.runs_dir(arguments))
    spec = RunSpec.load(source)
    if spec.evaluation is not None:
        raise UserError(f"run {name} is an evaluation: fork the run that it evaluated, {spec.evaluation.source}")
    if spec.train is None:
        raise UserError(
            f"run {name} runs {program_of(spec.script)}, which keeps its own checkpoints: submit it under a new "
            "name, with its own argument for resuming from a checkpoint"
        )
    refuse_on_fork([field.name for field in fields(TrainConfig) if field.name.replace("_", "-") in typed], source.best)
    own = [word for word in flags_of(spec) if not is_default_time(spec, word)]
    return [f"--runs-dir={source.path.parent}", *with_own_flags(own, arguments, known)]


def fork(options: ForkOptions) -> NewRun:
    """Submit a run that has the newest intact checkpoint of the other one. Raises as `start_run`."""
    source = cli.find_own_run(options.run, options.runs_dir)
    if not list_checkpoints(source.checkpoints):
        raise UserError(
            f"run {source.name} has no checkpoint in {source.checkpoints}: wait for the first one, or type hpc submit"
        )
    return start_run(options, (), lambda run, spec: give_newest_checkpoint(source, run, spec))


def give_newest_checkpoint(source: RunDir, run: RunDir, spec: RunSpec) -> RunSpec:
    """Put the newest intact checkpoint of a run, its metrics until then and its best model into a new run directory.

    Returns the new run's spec with its origin.

    Raises:
        UserError: no checkpoint is intact, or no step would follow the newest one.
    """
    tried = set[Path]()
    while path := next((path for path in list_checkpoints(source.checkpoints) if path not in tried), None):
        tried.add(path)
        copy = run.checkpoints / path.name
        # The other run, which may train, may delete it meanwhile: then it has a newer one.
        with suppress(FileNotFoundError):
            link_files(path, copy)
            if not find_damage(copy):
                break
        shutil.rmtree(copy, ignore_errors=True)
    else:
        raise UserError(f"run {source.name} has no intact checkpoint in {source.checkpoints}: type hpc submit")
    epochs_done = json.loads((copy / STATE_VALUES).read_bytes())["progress"]["epoch"]
    if spec.train and epochs_done >= spec.train.epochs:
        raise UserError(
            f"--epochs is {spec.train.epochs}, but {path.name} of run {source.name} is after epoch {epochs_done}: "
            f"use --epochs {epochs_done + 1} or more"
        )
    _give_results(source, run, step_of(path))
    return spec.with_training(forked_from=str(path))


def _give_results(source: RunDir, run: RunDir, step: int) -> None:
    """What the state of a step refers to: the metrics until then, and the best model."""
    for old, new in ((source.train_metrics, run.train_metrics), (source.eval_metrics, run.eval_metrics)):
        until_then = [{**line, "attempt": 0} for line in read_json_lines(old) if line["step"] <= step]
        new.parent.mkdir(exist_ok=True)
        write_atomic(new, "".join(map(json_line, until_then)))
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):  # the other run is just replacing it, or has none
            if json.loads((source.best / "result.json").read_bytes())["step"] <= step:
                link_files(source.best, run.best)
            return
        shutil.rmtree(run.best, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
