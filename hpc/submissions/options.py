"""The flags of `hpc submit` and of everything that submits: `hpc fork`, the Python API. Runs on the login node."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.flags import REPEATABLE, Flag
from hpc.base.units import Duration
from hpc.commands import cli
from hpc.run.spec import Network, Notification, Recovery, Resources, RunSpec, Service
from hpc.submissions.cluster_choice import SLURM_FLAGS, ClusterFlag
from hpc.submissions.sbatch import sbatch_advice, sbatch_variables
from training.config import command_line
from training.config.command_line import RecipeName
from training.config.device_choice import DeviceChoice
from training.config.train_config import TrainConfig

# The flags of the training that `--help` shows; `--help-all` shows all.
_EVERYDAY = {
    "data", "model", "weights", "epochs", "batch_size", "lr", "weight_decay", "amp", "num_workers", "seed", "recipe",
}  # fmt: skip
_TRAINING = {"pack", "pack_size", "recipe", *(field.name for field in dataclasses.fields(TrainConfig))}
_RARE = {
    "debug", "device", "container", "stage_keep", "stage_timeout", "python", "stage_env", "interface", "port_range",
    "notify", "notify_interruptions", "tracker", "grace_period", "stop_signal", "continue_with", "start_once",
    "time_min", "health_check", "evict_slow",
}  # fmt: skip


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
class TrainingFlags:
    """Flags of a training, except the classifier's own."""

    pack: Literal["off", "on", "auto"] = "off"
    """Decode an image folder once on every node and train from the pixels (docs/how-to/pack-images.md).
    Random crops are then taken from the centre square of each image. auto: pack if the run has enough epochs."""
    pack_size: int | None = None
    """Side in pixels of the images that --pack writes. Default: 8/7 of the model's image size, such as 256 for 224."""
    recipe: RecipeName = None


@dataclass(frozen=True, kw_only=True)
class _OwnScript:
    """Flags of your own script (-- script.py ARGS). It finds --data, any directory or archive, in $TORCHRELAY_DATA.

    Further flags for scripts are --python, --container, --stop-signal and --grace-period (see hpc submit --help-all).
    """

    in_place: bool = False
    """Run the script where it is instead of from a copy: edits then change the run when it restarts."""


@dataclass(frozen=True, kw_only=True)
class ScriptFlags(_OwnScript):
    """Flags of a user's script."""

    data: Path | None = None
    """Directory or archive to stage on every node; the script finds it, unpacked, in $TORCHRELAY_DATA."""


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(RunFlags, cli.Common):
    """The flags of every submission."""

    resources: Resources = field(default_factory=Resources)
    recovery: Recovery = field(default_factory=Recovery)
    network: Network = field(default_factory=Network)
    notification: Notification = field(default_factory=Notification)
    dry_run: bool = False
    """Check all flags, ask Slurm with sbatch --test-only, and print the script without submitting it."""
    wait: bool = False
    """Wait until the run ends, and print its result."""
    help_all: bool = False
    """Show all flags."""


@dataclass(frozen=True, kw_only=True)
class SubmitTraining(TrainingFlags, SubmitOptions):
    """Submit a training to Slurm and keep it running until it is complete.

    For example:
      hpc submit --nodes 2 --gpus-per-node 4
      hpc submit -N 2 --gpus-per-node a100:4 -t 12h --data /data/imagenet --model resnet50
      hpc submit -N 2 --gpus-per-node 4 -t 12h -- train.py --lr 0.1
      hpc submit job.sbatch --dry-run
    """

    train: TrainConfig


@dataclass(frozen=True, kw_only=True)
class _ScriptHelp:
    # These fields are only for the usage line: tyro never sees words that `replace_file` and `split_script` take.
    file: Annotated[str, Flag(metavar="[job.sbatch]", is_positional=True)] = ""
    """Batch script that works with sbatch; flags after it win over those in it."""
    script: Annotated[tuple[str, ...], Flag(metavar="[-- script.py ARGS]", is_positional=True)] = ()
    """Your own torchrun script with its arguments, or -m and a module, instead of the image classifier."""
    own_script: _OwnScript = field(default_factory=_OwnScript)


# The fields of the last base class come first.
@dataclass(frozen=True, kw_only=True)
class _SubmitHelp(SubmitTraining, _ScriptHelp):
    __doc__ = SubmitTraining.__doc__


@dataclass(frozen=True, kw_only=True)
class SubmitScript(ScriptFlags, SubmitOptions):
    """Submit your own torchrun script to Slurm and keep it running until it exits with 0."""


def split_script(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line at `--` into the flags and the user's script with its arguments."""
    if "--" not in arguments:
        return arguments, ()
    split = arguments.index("--")
    flags, script = arguments[:split], tuple(arguments[split + 1 :])
    return (flags if script else [*flags, "--"]), script  # explain() refuses a `--` that nothing follows


def options_for(script: tuple[str, ...]) -> type[SubmitOptions]:
    """Return the class of the flags for submitting this script or, if it is empty, a training."""
    return SubmitScript if script else SubmitTraining


def options_for_help(arguments: list[str], script: tuple[str, ...]) -> type[SubmitOptions]:
    """Like `options_for`, but if the arguments ask for help on a training, return the class that the help shows."""
    asked = not {"-h", "--help", "--help-all"}.isdisjoint(arguments)
    return _SubmitHelp if asked and not script else options_for(script)


def flag_names(options: type[Any]) -> dict[str, bool]:
    """Return the names of the flags that a --config file may set. The value is True for a switch."""
    not_in_files = {"config", "recipe", "help-all"}
    return {name: switch for name, switch in command_line.flag_names(options).items() if name not in not_in_files}


def is_everyday(flag: str) -> bool:
    """Return whether `--help` shows a flag; `--help-all` shows all."""
    return flag not in _RARE and (flag in _EVERYDAY or flag not in _TRAINING)


def reading_of(
    options: type[Any], script: tuple[str, ...] = (), *, all_flags: bool = False, hidden: Collection[str] = ()
) -> cli.Reading:
    """Return how to read a command line with flags of `hpc submit`, completed by the user's defaults and files.

    The help shows the everyday flags or, if `all_flags` is True, all flags, but never the `hidden` ones.
    """
    rare = {field.name for field in program.flags(options) if not is_everyday(field.name)}
    of_script = (SubmitScript,) if issubclass(options, SubmitTraining) else ()
    return cli.Reading(
        complete=lambda typed: program.build(options, with_defaults(typed, options)),
        refused=(SubmitTraining,) if script else of_script,
        explain=sbatch_advice.explain,
        shown=program.Help(hidden={*hidden, *(() if all_flags else rare)}),
    )


def run_verb(
    name: str,
    work: Callable[[Any], int],
    options: type[SubmitOptions],
    arguments: list[str],
    script: tuple[str, ...],
    hidden: Collection[str] = (),
) -> int:
    """Run a verb that has the flags of a submission. `--help` shows the everyday flags, and `--help-all` shows all."""
    all_flags = "--help-all" in arguments
    reading = reading_of(options, script, all_flags=all_flags, hidden=hidden)
    return cli.run(work, options, name, ["--help"] if all_flags else arguments, reading)


def with_defaults(given: Mapping[str, Any], options: type[Any]) -> dict[str, Any]:
    """Complete the given flags with the user's defaults and files. A training that names no data gets a data set.

    Raises:
        UserError: a flag is for another kind of program, or a file is wrong.
    """
    known = flag_names(options)
    for name in sorted(given.keys() - program.default_values(options).keys()):
        raise UserError(
            f"--{name} applies to your own script: add -- script.py ARGS, or leave it out"
            if "synthetic" in known
            else f"--{name} is a flag of the image classifier: leave it out, or pass it to your script: "
            f"-- script.py --{name} ..."
        )
    values = sbatch_variables.merged(flag_names(SubmitTraining), os.environ)
    if given.get("cluster") == "local":
        values = {name: value for name, value in values.items() if name not in SLURM_FLAGS}
    found = command_line.with_files(given, known, values)
    return command_line.with_data(found, known) if "synthetic" in known else found
