"""The flags of `hpc submit` and of everything that submits: `hpc fork`, the Python API. Runs on the login node."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast

from hpc.base import flag_files, program
from hpc.base.errors import UserError
from hpc.base.flags import REPEATABLE, Flag
from hpc.base.units import Duration
from hpc.commands import cli
from hpc.programs.program_flags import ProgramFlags
from hpc.programs.program_kinds import DEFAULT, kind_for, others
from hpc.programs.script_flags import OwnScript
from hpc.run.spec import DeviceChoice, Network, Notification, Recovery, Resources, RunSpec, Service
from hpc.submissions.resources import SLURM_FLAGS, ClusterFlag
from hpc.submissions.sbatch import sbatch_advice

# The flags of the training that `--help` shows; `--help-all` shows all.
_EVERYDAY = {
    "data", "model", "weights", "epochs", "batch_size", "lr", "weight_decay", "amp", "num_workers", "seed", "recipe",
}  # fmt: skip
_RARE = {
    "debug", "device", "container", "stage_keep", "stage_timeout", "python", "stage_env", "interface", "port_range",
    "notify", "tracker", "grace_period", "stop_signal", "continue_with", "start_once", "time_min", "health_check",
}  # fmt: skip
# Variables of sbatch that set a flag of ours. Others, such as SBATCH_EXPORT, are removed
# (hpc.slurm.client.adopt_environment).
_VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_CONSTRAINT": "constraint", "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_EXCLUSIVE": "sbatch", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos", "SBATCH_RESERVATION": "sbatch", "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
# The units that sbatch assumes for a number without a unit.
_UNITS = {"SBATCH_MEM_PER_NODE": "M", "SBATCH_TIMELIMIT": "m"}
Options = TypeVar("Options", bound="SubmitOptions")
_Class = TypeVar("_Class")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of every run, except its resources and recovery."""

    tracker: Annotated[tuple[Service, ...], REPEATABLE] = ()
    """Send the metrics to Weights & Biases or MLflow (docs/how-to/tracking.md). Repeatable."""
    after: Annotated[tuple[str, ...], Flag(metavar="RUN", is_repeatable=True)] = ()
    """Start after this run has ended. Repeatable."""
    after_ok: Annotated[tuple[str, ...], Flag(metavar="RUN", is_repeatable=True)] = ()
    """Start after this run has completed; if it fails, wait until hpc resume has completed it. Repeatable."""
    name: Annotated[str | None, Flag(metavar="NAME", letter="-J")] = None
    """Name of the run. Default: the model or script, and the time."""
    runs_dir: Path = Path("runs")
    """Directory of the runs, on shared storage."""
    cluster: Annotated[ClusterFlag, Flag(metavar="WHERE")] = "auto"
    """slurm, local (this machine, one process per node) or auto (slurm if available, or local in a terminal)."""
    config: Annotated[Path | None, Flag(metavar="YAML")] = None
    """YAML file of flags; the command line overrides it."""
    device: Annotated[DeviceChoice, Flag(metavar="DEVICE")] = "auto"
    """cuda, cpu, or auto: cuda if the run asks for GPUs and this machine has a driver or Slurm.
    With cuda, nodes on which torch cannot use the GPUs are avoided."""
    stage_dir: Path = Path("/tmp")  # noqa: S108 - node-local is what it is for; the directory below it is private
    """Directory on each node's own disk for the copy of the data. '$SLURM_TMPDIR' in quotes is expanded on the node."""
    stage_keep: Annotated[Duration, Flag(metavar="TIME")] = RunSpec.stage_keep
    """Time to keep unused copies of data in --stage-dir: 0s, 12h, 30d.
    If the disk is full, the least recently used copies are removed earlier."""
    stage_timeout: Annotated[Duration, Flag(metavar="TIME")] = RunSpec.stage_timeout
    """Drop a node whose copy of the data makes no progress for this time, because its mount may hang: 90s, 10m."""
    stage_env: bool = False
    """Copy this Python environment to each node's own disk and start the ranks from there."""
    python: Path | None = None
    """Python of another environment for your own script, such as ENV/bin/python. It needs only torch.
    Default: python3 of --container, the active venv or conda environment, or this Python."""
    container: Annotated[str | None, Flag(metavar="SIF")] = None
    """Apptainer image in which your own script runs."""


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Flags of a run's jobs, which may also change when the run resumes."""

    resources: Resources = field(default_factory=Resources)
    recovery: Recovery = field(default_factory=Recovery)
    network: Network = field(default_factory=Network)
    notification: Notification = field(default_factory=Notification)


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(JobFlags, RunFlags, cli.Common):
    """Submit a training to Slurm and keep it running until it is complete.

    For example:
      hpc submit --nodes 2 --gpus-per-node 4
      hpc submit -N 2 --gpus-per-node a100:4 -t 12h --data /data/imagenet --model resnet50
      hpc submit -N 2 --gpus-per-node 4 -t 12h -- train.py --lr 0.1
      hpc submit job.sbatch --dry-run
    """

    REFUSED: ClassVar[frozenset[str]] = frozenset()
    """The fields whose flags a verb with these options refuses."""

    program: ProgramFlags
    """The program, with its own flags (`with_program`)."""
    dry_run: bool = False
    """Check all flags, ask Slurm with sbatch --test-only, and print the script without submitting it."""
    wait: bool = False
    """Wait until the run ends, and print its result."""
    help_all: bool = False
    """Show all flags."""


@dataclass(frozen=True, kw_only=True)
class _ScriptHelp:
    own_script: OwnScript = field(default_factory=OwnScript)


def _for_help(options: type[SubmitOptions]) -> type[SubmitOptions]:
    """Return the class of these options that the help shows, with the words and the flags of a script."""

    @dataclass(frozen=True, kw_only=True)
    class Shown(options, _ScriptHelp):  # type: ignore[valid-type, misc]  # fields of the last base class come first
        script: Annotated[tuple[str, ...], Flag(metavar="[-- script.py ARGS]", is_positional=True)] = ()
        """Your own torchrun script with its arguments, or -m and a module, instead of the image classifier."""

    Shown.__doc__ = options.__doc__
    return Shown


def with_program(options: type[_Class], flags: type[Any]) -> type[_Class]:
    """Return the class of these options whose `program` has these flags of a program."""
    return cast("type[_Class]", _with_program(options, flags))  # type: ignore[arg-type]  # classes are hashable


@cache  # objects of two such classes would not be equal
def _with_program(options: Any, flags: Any) -> Any:
    @dataclass(frozen=True, kw_only=True)
    class WithProgram(options):  # type: ignore[misc]  # a class that is known only here
        program: flags

    WithProgram.__doc__ = options.__doc__
    return WithProgram


def split_script(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line at `--` into the flags and the user's script with its arguments."""
    if "--" not in arguments:
        return arguments, ()
    split = arguments.index("--")
    flags, script = arguments[:split], tuple(arguments[split + 1 :])
    return (flags if script else [*flags, "--"]), script  # explain() refuses a `--` that nothing follows


def flag_names(options: type[Any]) -> dict[str, bool]:
    """Return the names of the flags that a --config file may set. The value is True for a switch."""
    not_in_files = {"config", "recipe", "help-all"}
    return {name: switch for name, switch in flag_files.flag_names(options).items() if name not in not_in_files}


def submit_flags(script: Sequence[str] = ()) -> type[SubmitOptions]:
    """Return the class of the flags of `hpc submit` for a script or, without one, for the classifier."""
    return with_program(SubmitOptions, kind_for(script))


def is_everyday(flag: str) -> bool:
    """Return whether `--help` shows a flag; `--help-all` shows all."""
    own = {field.name for field in program.flags(DEFAULT)}
    return flag not in _RARE and (flag in _EVERYDAY or flag not in own)


def run_verb(
    name: str,
    work: Callable[[Any], int],
    options: type[SubmitOptions],
    arguments: list[str],
    script: tuple[str, ...],
    complete: Callable[[dict[str, Any]], Any] | None = None,
) -> int:
    """Run a verb that has the flags of a submission. `complete` makes the options of the typed flags, as `completed`.

    `--help` shows the everyday flags, and `--help-all` all flags.
    """
    kind, all_flags = kind_for(script), "--help-all" in arguments
    parsed = with_program(options, kind)
    if not script and not {"-h", "--help", "--help-all"}.isdisjoint(arguments):
        parsed = _for_help(parsed)
    rare = {field.name for field in program.flags(parsed) if not is_everyday(field.name)}
    return cli.run(
        work, parsed, name, ["--help"] if all_flags else arguments,
        complete=complete or (lambda typed: completed(typed, options, script)), refused=others(kind),
        explain=sbatch_advice.explain, hidden=() if all_flags else rare,
    )  # fmt: skip


def completed(typed: Mapping[str, Any], options: type[Options], script: tuple[str, ...] = ()) -> Options:
    """Return the typed flags, completed by the user's defaults and files, with the program that they submit.

    Raises:
        UserError: a flag is wrong or for another kind of program, or a file is wrong.
    """
    kind = kind_for(script)
    parsed = with_program(options, kind)
    for name in sorted(typed.keys() - program.default_values(parsed).keys()):
        raise UserError(
            f"--{name} is a flag of the image classifier: leave it out, or pass it to your script: "
            f"-- script.py --{name} ..."
            if script
            else f"--{name} applies to your own script: add -- script.py ARGS, or leave it out"
        )
    return build(parsed, with_defaults(typed, parsed, kind.preset), script)


def with_defaults(
    typed: Mapping[str, Any], parsed: type[Any], preset: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
) -> dict[str, Any]:
    """Return the typed flags with those of files and of the user's defaults, and with a preset (`with_files`).

    Raises:
        UserError: a file is wrong.
    """
    defaults = flag_files.merge_defaults(user_defaults(os.environ))
    if typed.get("cluster") == "local":
        defaults = {name: value for name, value in defaults.items() if name not in SLURM_FLAGS}
    return flag_files.with_files(typed, flag_names(parsed), defaults, preset)


def user_defaults(environment: Mapping[str, str]) -> list[flag_files.Defaults]:
    """Return the defaults of each file and each variable of sbatch for the flags of `hpc submit`; later ones win.

    Raises:
        UserError: a file cannot be read, or has an unknown flag.
    """
    found = flag_files.read_defaults(flag_names(submit_flags()))
    if "SLURM_JOB_ID" in environment:
        return found  # inside a job, the variables describe that job
    for variable, flag in _VARIABLES.items():
        if value := environment.get(variable):
            found.append(flag_files.Defaults(source=variable, settings={flag: _flag_value(variable, flag, value)}))
    return found


def _flag_value(variable: str, flag: str, value: str) -> str | list[str]:
    if flag == "sbatch":
        option = variable.removeprefix("SBATCH_").lower()
        return [option if value == option else f"{option}={value}"]
    return value + _UNITS.get(variable, "") if value.isdigit() else value


def build(parsed: type[Options], values: Mapping[str, Any], script: tuple[str, ...] = ()) -> Options:
    """Return options with these values, whose program is `script` unless that is empty."""
    options = program.build(parsed, values)
    return replace(options, program=options.program.with_arguments(script)) if script else options
