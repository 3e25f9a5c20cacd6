"""The verb `sweep`: its flags, what it prints, and its end. Runs on the login node, like a supervisor."""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from hpc import cli
from hpc.core import program
from hpc.core.errors import TorchrelayError, UserError, need_package
from hpc.core.git import git_revision
from hpc.core.ownership import check_is_own
from hpc.core.rundir import RunDir
from hpc.core.text import visible
from hpc.flags import changed_flags, typed_names
from hpc.spec import check_run_name, program_of
from hpc.submit.code_copy import copy_files, find_code, own_environment
from hpc.submit.options import (
    RunFlags,
    ScriptFlags,
    SubmitScript,
    SubmitTraining,
    TrainingFlags,
    flag_names,
    is_everyday,
    options_for,
    split_script,
    with_defaults,
)
from hpc.sweep.directory import Direction, Pruner, Sampler, SweepDir, SweepSpec
from hpc.sweep.space import grid_of, read_space
from training.config.train_config import TrainConfig

_POLL_SECONDS = 5.0
_MOST_POLL_SECONDS = 300.0
_TRIALS, _PARALLEL = 20, 4
# What a trial has of its own, or not at all.
_NOT_OF_TRIALS = {"name", "runs_dir", "config"}


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Those of a sweep."""

    param: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUES")]] = ()
    """A flag that differs between trials: lr=log:1e-4,1e-1, momentum=float:0.8,0.99, epochs=int:5,20, or a list:
    batch-size=64,128,256. Repeatable."""
    trials: int | None = None
    """Number of runs. Default: 20, or with --sampler grid one for each combination."""
    parallel: int | None = None
    """Runs at the same time. Default: 4."""
    metric: str = "val/accuracy"
    """What is compared, the best value of each run: FILE/NAME of metrics/*.jsonl, such as val/loss or train/loss."""
    direction: Direction | None = None
    """Default: maximize an accuracy, minimize anything else."""
    sampler: Sampler = "tpe"
    """How values are chosen: by those before, at random, or all of them (lists only)."""
    pruner: Pruner = "median"
    """Cancel a run that is worse than the median of the others after as many steps; not before 5 have ended."""
    sweep_seed: int = 0
    """Random seed of the choice."""
    once: bool = False
    """Look after the trials once and exit: for cron."""


@dataclass(frozen=True, kw_only=True)
class SweepTraining(SweepFlags, SubmitTraining):
    """Submit a run for each of many settings, and find the best one.

    For example:
      hpc sweep --name pets --param lr=log:1e-3,1 --param batch-size=64,128 --trials 20 --data /shared/pets
      hpc sweep --name pets --param lr=0.1,0.01 -- train.py --lr {lr}

    Typed again with --name alone, it goes on. Trials are runs in runs/NAME: hpc status, cancel and report take NAME.
    """


@dataclass(frozen=True, kw_only=True)
class SweepScript(SweepFlags, SubmitScript):
    """Submit a run of your own script for each of many settings, and find the best one."""


@dataclass(frozen=True, kw_only=True)
class ContinueOptions(cli.RunsOptions):
    """Go on with a sweep."""

    name: str | None = None
    trials: int | None = None
    parallel: int | None = None
    once: bool = False


Options = SweepTraining | SweepScript | ContinueOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    flags, script = split_script(list(sys.argv[1:] if argv is None else argv))
    if not script and not {"param", "help", "help-train"} & typed_names(flags) and "-h" not in flags:
        return cli.run(lambda given: sweep(_named(given), _continued, given), ContinueOptions, "sweep", flags)
    options: type[SweepTraining | SweepScript] = SweepScript if script else SweepTraining
    others = "--help-train" in flags
    return cli.run(
        lambda given: sweep(_named(given), partial(_started, script=script), given),
        options,
        "sweep",
        ["--help"] if others else flags,
        expand=lambda given: with_defaults(given, flag_names(options_for(script))),
        hidden={field.name for field in program.flags(options) if is_everyday(field.name) == others},
    )


def _named(options: Options) -> SweepDir:
    """The directory of the sweep. Raises UserError if it has no name, or one that is no directory's."""
    need_package("optuna", "sweep", "hpc sweep")
    if options.name is None:
        raise UserError("the sweep has no name: add --name NAME; later, hpc sweep --name NAME goes on")
    check_run_name(options.name)
    return SweepDir(options.runs_dir.expanduser().resolve() / options.name)


def sweep(directory: SweepDir, spec_of: Callable[[SweepDir, Any], SweepSpec], options: Options) -> int:
    """Start or continue a sweep, and look after it until its end. Returns 1 if no trial was completed."""
    spec = spec_of(directory, options)
    from hpc.sweep.controller import Controller  # noqa: PLC0415 - imports Optuna
    from hpc.sweep.result import show, write_result  # noqa: PLC0415

    out = sys.stderr if options.json else sys.stdout
    controller = Controller(
        directory, spec, lambda line: print(visible(f"{time.strftime('%H:%M:%S')} {line}"), file=out, flush=True)
    )
    pause, is_over = _POLL_SECONDS, False
    while not is_over:
        try:
            is_over, pause = controller.step(), _POLL_SECONDS
        except UserError:
            if not list(directory.path.glob("trial-*")):
                shutil.rmtree(directory.path)  # nothing was started
            raise
        except (TorchrelayError, OSError) as error:
            if options.once:
                raise
            pause = min(2 * pause, _MOST_POLL_SECONDS)
            print(f"hpc sweep: next check in {pause:.0f} s: {error}", file=sys.stderr, flush=True)
        write_result(directory, spec, controller.study)
        if options.once:
            break
        if not is_over:
            time.sleep(pause)
    return show(directory, spec, controller.study, as_json=options.json)


def _started(directory: SweepDir, options: SweepTraining | SweepScript, *, script: tuple[str, ...]) -> SweepSpec:
    """Check what is asked for, and make the directory. Raises UserError."""
    if not options.param:
        raise UserError("there is nothing to choose: add --param NAME=VALUES")
    if directory.spec_file.exists():
        raise UserError(
            f"there is a sweep {options.name}: type hpc sweep --name {options.name} to go on, or choose another --name"
        )
    if directory.path.exists():
        raise UserError(f"{directory.path} exists already: choose another --name")
    if options.dry_run or options.wait:
        raise UserError("a sweep has no --dry-run and no --wait: try hpc submit --dry-run with the same flags")
    space = read_space(options.param)
    _check_names(space, script)
    trials = options.trials
    if trials is None:
        trials = len(grid_of(space)) if options.sampler == "grid" else _TRIALS
    code = None
    if isinstance(options, SweepTraining) or not options.no_snapshot:
        include = options.include if isinstance(options, SweepScript) else ()
        code = find_code(Path.cwd(), script, include, options.runs_dir, elsewhere=own_environment(options))
    spec = SweepSpec(
        param=options.param, trials=trials, parallel=_PARALLEL if options.parallel is None else options.parallel,
        metric=options.metric, sampler=options.sampler,
        direction=options.direction or ("maximize" if "accuracy" in options.metric else "minimize"),
        pruner=options.pruner, seed=options.sweep_seed, arguments=tuple(_arguments_of_trials(options)),
        script=code.script if code else script, names=code.names if code else None,
        revision=git_revision(code.root) if code else None,
    )  # fmt: skip
    _check_numbers(spec)
    directory.path.mkdir(mode=0o700, parents=True)
    if code:
        copy_files(code, directory.code)
    directory.save(spec)
    return spec


def _check_names(names: Iterable[str], script: Sequence[str]) -> None:
    for name in names:
        if script and not any(f"{{{name}}}" in word for word in script):
            raise UserError(f"--param {name}: the command line of {program_of(script)} has no {{{name}}} for its value")
        if not script and name.replace("-", "_") not in {field.name for field in dataclasses.fields(TrainConfig)}:
            raise UserError(f"--param {name}: there is no training flag --{name}; hpc sweep --help-train lists them")


def _arguments_of_trials(options: SweepTraining | SweepScript) -> list[str]:
    """The flags that all trials have, with the defaults and files of the user as they are now."""
    groups = [options.resources, options.recovery, options.network, options.notification]
    own: list[type] = [RunFlags, ScriptFlags if isinstance(options, SweepScript) else TrainingFlags]
    names = {field.name for kind in own for field in dataclasses.fields(kind)} - _NOT_OF_TRIALS
    groups += [options.train] if isinstance(options, SweepTraining) else []
    return [*changed_flags(options, names), *(word for group in groups for word in changed_flags(group))]


def _continued(directory: SweepDir, options: ContinueOptions) -> SweepSpec:
    """What the sweep was started with; --trials and --parallel may change. Raises UserError."""
    if not directory.spec_file.exists():
        raise UserError(f"there is no sweep {options.name} in {options.runs_dir}: add --param NAME=VALUES to start one")
    check_is_own(RunDir(directory.path))
    spec = directory.load()
    trials = spec.trials if options.trials is None else options.trials
    parallel = spec.parallel if options.parallel is None else options.parallel
    spec = dataclasses.replace(spec, trials=trials, parallel=parallel)
    _check_numbers(spec)
    directory.cancelled.unlink(missing_ok=True)
    directory.save(spec)
    return spec


def _check_numbers(spec: SweepSpec) -> None:
    if min(spec.trials, spec.parallel) < 1:
        raise UserError(f"--trials is {spec.trials} and --parallel {spec.parallel}: use 1 or more")


if __name__ == "__main__":
    sys.exit(main())
