"""`hpc scaling`: the flags, the start and the end of a scaling study. Runs on the login node."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from hpc.base.errors import UserError
from hpc.base.flags import Flag
from hpc.base.units import Gpus, NodeRange
from hpc.commands import cli
from hpc.run.spec import Resources
from hpc.studies.members import common, user_code
from hpc.studies.scaling.scaling_dir import Mode, ScalingDir, ScalingSpec, read_gpus, read_nodes, split_sizes
from hpc.studies.verb import NOT_OF_GROUPS, check_is_new, directory_of, go_on, look_after, make, tell_on, typed_flags
from hpc.submissions.options import SubmitScript, SubmitTraining, run_verb, split_script
from hpc.submissions.sbatch.sbatch_advice import explain


@dataclass(frozen=True, kw_only=True)
class StudyResources(Resources):
    """Resources of the Slurm jobs."""

    nodes: Annotated[NodeRange, Flag(metavar="N...", letter="-N")] = NodeRange(1)
    """Numbers of nodes, with a run for each number: 1 2 4 8."""
    gpus_per_node: Annotated[Gpus, Flag(metavar="N...")] = Gpus(1)
    """Numbers of GPUs per node: 1 4, or a100:1 a100:4. Each is combined with each number of nodes."""


@dataclass(frozen=True, kw_only=True)
class ScalingFlags:
    """The flags of a scaling study."""

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


@dataclass(frozen=True, kw_only=True)
class ScalingTraining(ScalingFlags, SubmitTraining):
    """Run the same training on several numbers of nodes and GPUs, and compare the speed.

    For example:
      hpc scaling --name resnet --nodes 1 2 4 8 --gpus-per-node 1 4 --data /shared/pets --model resnet50
      hpc scaling --name own --nodes 1 2 4 -- train.py

    To continue an interrupted study, type hpc scaling --name NAME. The runs are in runs/NAME: hpc status, hpc cancel
    and hpc report accept NAME.
    """


@dataclass(frozen=True, kw_only=True)
class ScalingScript(ScalingFlags, SubmitScript):
    """Run your own script on several numbers of nodes and GPUs, and compare the speed."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions(cli.RunsOptions):
    """Continue a study."""

    name: str | None = None
    parallel: int | None = None
    once: bool = False


Options = ScalingTraining | ScalingScript | StudyOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb."""
    flags, script = split_script(list(sys.argv[1:] if argv is None else argv))
    own = {field.name.replace("_", "-") for field in dataclasses.fields(StudyOptions)}
    typed = typed_flags(flags)
    if not script and "name" in typed and typed <= own and "-h" not in flags:
        return cli.run(partial(study, _continued), StudyOptions, "scaling", flags, cli.Reading(explain=explain))
    nodes, gpus, others = split_sizes(flags)
    options: type[ScalingTraining | ScalingScript] = ScalingScript if script else ScalingTraining
    started = partial(study, partial(_started, nodes=nodes, gpus=gpus, script=script))
    return run_verb("scaling", started, options, others, script, hidden=NOT_OF_GROUPS)


def study(spec_of: Callable[[ScalingDir, Any], ScalingSpec], options: Options) -> int:
    """Start or continue a study, and follow its runs to the end. Returns 1 if nothing was measured."""
    directory = directory_of(ScalingDir, options.name, options.runs_dir)
    spec = spec_of(directory, options)
    from hpc.studies.scaling.scaling_controller import ScalingController  # noqa: PLC0415 - imports Bokeh
    from hpc.studies.scaling.scaling_result import show  # noqa: PLC0415 - imports Bokeh

    controller = ScalingController(directory, spec, tell_on(as_json=options.json))
    look_after(directory, controller, once=options.once, is_new=not isinstance(options, StudyOptions))
    return show(directory, spec, controller.measures(), as_json=options.json)


def _started(
    directory: ScalingDir,
    options: ScalingTraining | ScalingScript,
    *,
    nodes: Sequence[str],
    gpus: Sequence[str],
    script: tuple[str, ...],
) -> ScalingSpec:
    """Check the flags, make the study's directory, and return its spec. Raises UserError if a flag is wrong."""
    if not options.minutes > 0:
        raise UserError(f"--minutes is {options.minutes:g}: use more than 0")
    if options.parallel < 1:
        raise UserError(f"--parallel is {options.parallel}: use 1 or more")
    check_is_new(directory, options)
    gpu_type, numbers = read_gpus(gpus or [str(options.resources.gpus_per_node)])
    code = user_code(options, script)
    spec = ScalingSpec(
        nodes=read_nodes(nodes or [str(options.resources.nodes)]), gpus=numbers, gpu_type=gpu_type,
        minutes=options.minutes, mode=options.mode,
        batch_size=options.train.batch_size if isinstance(options, ScalingTraining) else None,
        parallel=options.parallel, **common(options, code),
    )  # fmt: skip
    if len(spec.sizes) == 1:
        raise UserError("there is one size only: add more, such as --nodes 1 2 4")
    make(directory, spec, code)
    return spec


def _continued(directory: ScalingDir, options: StudyOptions) -> ScalingSpec:
    """Return the spec of the study, with --parallel changed if given. Raises UserError if there is no study."""
    hint = "add --nodes 1 2 4 to start one"
    return go_on(directory, options.runs_dir, hint, parallel=options.parallel)
