"""`hpc sweep`: the flags, the start and the end of a sweep. Runs on the login node."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hpc.base.errors import UserError, need_package
from hpc.base.flags import Flag
from hpc.studies.group import GroupDir, common
from hpc.studies.study import ContinueOptions, Study
from hpc.studies.study import main as run_study
from hpc.studies.sweep_spec import Direction, Pruner, Sampler, SweepDir, SweepSpec, grid_of, read_space
from hpc.submissions.options import SubmitOptions
from hpc.submissions.plan import code_of

_TRIALS = 20


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SubmitOptions):
    """Submit a run (a trial) for each of many settings, and find the best settings.

    For example:
      hpc sweep --name pets --param lr=log:1e-3,1 --param batch-size=64,128 --data /shared/pets
      hpc sweep --name mine --param lr=0.1,0.01 -- train.py
      hpc sweep --name mine --param lr=0.1,0.01 -- train.py optimizer.lr={lr}

    To continue an interrupted sweep, type hpc sweep --name NAME. The trials are runs in runs/NAME: hpc status,
    hpc cancel and hpc report accept NAME.
    """

    REFUSED = frozenset({"dry_run", "wait"})

    param: Annotated[tuple[str, ...], Flag(metavar="NAME=VALUES", is_repeatable=True)] = ()
    """Flag that differs between the trials, with a range or a list of values. Repeatable.
    Ranges: lr=log:1e-4,1e-1, momentum=float:0.8,0.99, epochs=int:5,20. List: batch-size=64,128,256."""
    name: Annotated[str | None, Flag(metavar="NAME", letter="-J")] = None
    """Name of the sweep, which you must give."""
    trials: int | None = None
    """Number of trials. Default: 20, or with --sampler grid one for each combination."""
    parallel: int = 4
    """Number of trials that run at the same time."""
    metric: Annotated[str, Flag(metavar="NAME")] = "val/accuracy"
    """Metric whose best value in each trial is compared, such as val/accuracy, val/loss or train/loss.
    FILE/NAME: the values NAME of metrics/FILE.jsonl."""
    direction: Direction | None = None
    """Whether to maximize or minimize the metric. Default: maximize accuracies, minimize all other metrics."""
    sampler: Sampler = "tpe"
    """How to choose values: by the results of earlier trials (tpe), at random, or all combinations of lists (grid)."""
    pruner: Pruner = "median"
    """median: when 5 trials have ended, cancel each trial that is worse than their median after the same steps."""
    sweep_seed: int = 0
    """Random seed of the sampler."""
    once: bool = False
    """Check and start trials once, then exit: for cron."""


@dataclass(frozen=True, kw_only=True)
class ContinueSweep(ContinueOptions):
    """Continue a sweep."""

    trials: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hpc sweep`, and return its exit code."""
    return run_study(_study, start, SweepDir, SweepOptions, sys.argv[1:] if argv is None else argv, ContinueSweep)


def _study() -> type[Study[Any]]:
    need_package("optuna", "sweep", "hpc sweep")
    from hpc.studies.sweep_study import SweepStudy  # noqa: PLC0415 - imports Optuna

    return SweepStudy


def start(directory: GroupDir[Any], options: SweepOptions) -> SweepSpec:
    """Check the flags, make the sweep's directory, and return its spec. Raises UserError if a flag is wrong."""
    if not options.param:
        raise UserError("no flag differs between the trials: add --param NAME=VALUES")
    space = read_space(options.param)
    trials = options.trials
    if trials is None:
        trials = len(grid_of(space)) if options.sampler == "grid" else _TRIALS
    code = code_of(options)
    spec = SweepSpec(
        param=options.param, trials=trials, parallel=options.parallel,
        metric=options.metric, sampler=options.sampler,
        direction=options.direction or ("maximize" if "accuracy" in options.metric else "minimize"),
        pruner=options.pruner, seed=options.sweep_seed, **common(options, code),
    )  # fmt: skip
    directory.make(spec, code)
    return spec
