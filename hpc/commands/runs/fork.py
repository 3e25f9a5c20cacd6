"""`hpc fork`: submit a run that continues from another run's newest checkpoint, with other flags. Login node.

The new run is submitted as by `hpc submit`; flags that are not given keep the values of the other run. The new run has
hard links to the checkpoint and the best model: nothing writes to these files, and the other run may delete its links.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from torchrelay.checkpoint_files import STATE_VALUES, find_damage, list_checkpoints, step_of

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.files import json_line, link_files, number_in, read_json_lines, write_atomic
from hpc.base.flags import POSITIONAL, Flag
from hpc.commands import cli
from hpc.programs.program_flags import ProgramFlags
from hpc.programs.program_kinds import DEFAULT, others, program_of_run, settings_of
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec, program_of
from hpc.submissions.new_run import NewRun, show, start_run
from hpc.submissions.options import SubmitOptions, build, split_script, with_program
from hpc.submissions.sbatch.sbatch_advice import explain

_OF_THE_FORK = {"run", "name", "runs_dir", "tracker", "dry_run", "wait", "json", "debug"}
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class ForkOptions(SubmitOptions):
    """Submit a new run that continues from the newest checkpoint of another run, with other flags.

    For example:
      hpc fork first --name low --lr 0.01
      hpc fork mine --name low -- --lr 0.01

    Flags that you leave out keep the other run's values. Arguments after -- are appended to those of the other run's
    script. The metrics up to the checkpoint are copied into the new run as attempt 0.
    """

    REFUSED = frozenset({"config", "help_all", *DEFAULT.FIXED})

    run: Annotated[str, POSITIONAL]
    """Directory or name of the other run, which may still be running."""
    name: Annotated[str | None, Flag(metavar="NAME", letter="-J")] = None
    """Name of the new run, which you must give."""


ForkTraining = with_program(ForkOptions, DEFAULT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hpc fork`, and return its exit code."""
    flags, arguments = split_script(list(sys.argv[1:] if argv is None else argv))
    inherited = {field.name for field in program.flags(ForkTraining)} - _OF_THE_FORK
    return cli.run(
        lambda options: show(fork(options), options), ForkTraining, "fork", flags,
        complete=lambda typed: options_of(typed, arguments), refused=others(DEFAULT), explain=explain,
        inherited=inherited,
    )  # fmt: skip


def options_of(given: Mapping[str, Any], arguments: Sequence[str] = ()) -> ForkOptions:
    """Complete the given flags with the settings of the other run, whose program also gets these arguments.

    Raises:
        UserError: a flag or an argument is wrong.
    """
    name = given["run"]
    if "name" not in given:
        raise UserError(f"the new run has no name: type hpc fork {name} --name NEW")
    for flag in ("config", "recipe"):
        if flag in given:
            raise UserError(f"--{flag} is only for new trainings: give the flags that change instead")
    source = cli.find_own_run(name, cli.runs_dir(given))
    spec = RunSpec.load(source)
    before = program_of_run(spec)
    parsed = with_program(ForkOptions, type(before))
    for flag in sorted(given.keys() - program.default_values(parsed).keys() if before.script else ()):
        raise UserError(
            f"--{flag} is a flag of another kind of program, but run {name} runs {program_of(spec.program.argv)}: "
            f"type -- --{flag} ... for an argument of the script"
        )
    options = build(parsed, {"runs-dir": source.path.parent, **settings_of(spec), **given}, before.script)
    after = options.program.with_arguments(arguments) if arguments else options.program
    old, new = program.values_of(before), program.values_of(after)
    after.check_fork([flag for flag in old if new[flag] != old[flag]], source)
    return replace(options, program=after)


def fork(options: ForkOptions) -> NewRun:
    """Submit a run that starts from the other run's newest intact checkpoint. Raises as `start_run`."""
    source = cli.find_own_run(options.run, options.runs_dir)
    if not list_checkpoints(source.checkpoints):
        raise UserError(
            f"run {source.name} has no checkpoint in {source.checkpoints}: wait for the first one, or type hpc submit"
        )
    return start_run(options, lambda run, spec: give_newest_checkpoint(source, run, spec, options.program))


def give_newest_checkpoint(source: RunDir, run: RunDir, spec: RunSpec, flags: ProgramFlags) -> RunSpec:
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
    objects = json.loads((copy / STATE_VALUES).read_bytes())["objects"]
    flags.check_start(objects, f"{path.name} of run {source.name}")
    _give_results(source, run, step_of(path))
    return replace(spec, forked_from=str(path))


def _give_results(source: RunDir, run: RunDir, step: int) -> None:
    """Give the new run the metrics up to a step, and the best model, if it was saved no later than the step.

    A script may have written all of these files, in any form.
    """
    for old, new in ((source.train_metrics, run.train_metrics), (source.eval_metrics, run.eval_metrics)):
        until_then = [{**line, "attempt": 0} for line in read_json_lines(old) if _is_until(line, step)]
        new.parent.mkdir(exist_ok=True)
        write_atomic(new, "".join(map(json_line, until_then)))
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):  # the other run is replacing its best model now, or has none
            with suppress(ValueError):
                if _is_until(json.loads((source.best / "result.json").read_bytes()), step):
                    link_files(source.best, run.best)
            return
        shutil.rmtree(run.best, ignore_errors=True)


def _is_until(record: Any, step: int) -> bool:
    at = number_in(record, "step") if isinstance(record, dict) else None
    return at is not None and at <= step
