"""`hpc scaling`: the flags, the start and the end of a scaling study. Runs on the login node."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from hpc.base.flags import Flag
from hpc.base.units import Gpus, NodeRange
from hpc.run.spec import Resources
from hpc.studies.group import GroupDir, common
from hpc.studies.scaling_study import Mode, ScalingDir, ScalingSpec, ScalingStudy, read_gpus, read_nodes, split_sizes
from hpc.studies.study import main as run_study
from hpc.submissions.options import SubmitOptions
from hpc.submissions.plan import code_of


@dataclass(frozen=True, kw_only=True)
class StudyResources(Resources):
    """Resources of the Slurm jobs."""

    nodes: Annotated[NodeRange, Flag(metavar="N...", letter="-N")] = NodeRange(1)
    """Numbers of nodes, with a run for each number: 1 2 4 8."""
    gpus_per_node: Annotated[Gpus, Flag(metavar="N...")] = Gpus(1)
    """Numbers of GPUs per node: 1 4, or a100:1 a100:4. Each is combined with each number of nodes."""


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(SubmitOptions):
    """Run the same training on several numbers of nodes and GPUs, and compare the speed.

    For example:
      hpc scaling --name resnet --nodes 1 2 4 8 --gpus-per-node 1 4 --data /shared/pets --model resnet50
      hpc scaling --name own --nodes 1 2 4 -- train.py

    To continue an interrupted study, type hpc scaling --name NAME. The runs are in runs/NAME: hpc status, hpc cancel
    and hpc report accept NAME.
    """

    REFUSED = frozenset({"dry_run", "wait"})

    minutes: float = 5.0
    """Minutes of training in each run."""
    mode: Mode = "weak"
    """weak: --batch-size is for the smallest run and grows with the number of ranks. strong: all runs have the same."""
    parallel: int = 1
    """Number of runs at the same time. Runs that share storage or a network slow each other down."""
    once: bool = False
    """Check and start runs once, then exit: for cron."""
    name: Annotated[str | None, Flag(metavar="NAME", letter="-J")] = None
    """Name of the scaling study, which you must give."""
    resources: StudyResources = field(default_factory=StudyResources)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hpc scaling`, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    nodes, gpus, others = split_sizes(words[:end])
    # One number of each stays on the command line, which thus starts a study.
    first = [*(f"--nodes={count}" for count in nodes[:1]), *(f"--gpus-per-node={count}" for count in gpus[:1])]
    started = partial(start, nodes=nodes, gpus=gpus)
    return run_study(lambda: ScalingStudy, started, ScalingDir, ScalingOptions, [*first, *others, *words[end:]])


def start(
    directory: GroupDir[Any], options: ScalingOptions, *, nodes: Sequence[str], gpus: Sequence[str]
) -> ScalingSpec:
    """Check the flags, make the study's directory, and return its spec. Raises UserError if a flag is wrong."""
    gpu_type, numbers = read_gpus(gpus or [str(options.resources.gpus_per_node)])
    code = code_of(options)
    spec = ScalingSpec(
        nodes=read_nodes(nodes or [str(options.resources.nodes)]),
        gpus=numbers,
        gpu_type=gpu_type,
        minutes=options.minutes,
        mode=options.mode,
        parallel=options.parallel,
        **common(options, code),
    )
    directory.make(spec, code)
    return spec
