"""The flags of `hpc submit`, and of all that submits: `hpc fork`, and the Python API. Runs on the login node."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hpc import cli
from hpc.core import program
from hpc.spec import Network, Notification, Recovery, Resources, Service
from hpc.submit import sbatch_flags, sbatch_variables
from hpc.submit.cluster_choice import SLURM_FLAGS, ClusterFlag
from training.config import command_line
from training.config.command_line import RecipeName
from training.config.device_choice import DeviceChoice
from training.config.train_config import TrainConfig

# What `--help` shows of the training; `--help-train` shows the other flags.
_EVERYDAY = {
    "data", "model", "weights", "epochs", "batch_size", "lr", "weight_decay", "amp", "num_workers", "seed", "recipe",
}  # fmt: skip
_TRAINING = {"pack", "pack_size", "recipe", *(field.name for field in dataclasses.fields(TrainConfig))}
_RARE = {
    "debug", "device", "container", "stage_keep", "stage_timeout", "python", "stage_env", "interface", "port_range",
    "notify", "notify_interruptions", "tracker", "grace", "stop_signal",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Those of every run, but for its resources and recovery."""

    tracker: tyro.conf.UseAppendAction[tuple[Service, ...]] = ()
    """Send the metrics to Weights & Biases or MLflow (docs/how-to/tracking.md). Repeatable."""
    after: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN")]] = ()
    """Begin when this run has ended. Repeatable."""
    after_ok: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN")]] = ()
    """Begin when this run is complete; if it fails, wait until hpc resume has completed it. Repeatable."""
    name: Annotated[str | None, tyro.conf.arg(aliases=("-J",), metavar="NAME")] = None
    """Name of the run. Default: the model or script, and the time."""
    runs_dir: Path = Path("runs")
    """Directory of the runs, on shared storage."""
    cluster: Annotated[ClusterFlag, tyro.conf.arg(metavar="WHERE")] = "auto"
    """slurm; local: this machine, one process per pretended node; auto: Slurm, or in a terminal this machine."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="YAML")] = None
    """File of flags; the command line overrides it."""
    device: Annotated[DeviceChoice, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """cuda: avoid nodes where torch can use no GPU; cpu; auto: cuda if there are GPUs, and a driver or Slurm."""
    stage_dir: Path = Path("/tmp")  # noqa: S108 - node-local is what it is for; the directory below it is private
    """Each node's own disk, for the copy of the data. In quotes, '$SLURM_TMPDIR' and others are the node's."""
    stage_keep: Annotated[str, tyro.conf.arg(metavar="TIME")] = "7d"
    """How long to keep unused copies there for later attempts: 0s, 12h, 30d.
    If the disk is full, the least recently used are removed earlier."""
    stage_timeout: Annotated[str, tyro.conf.arg(metavar="TIME")] = "5m"
    """Leave out a node that gets nothing of the data for this long: its mount hangs. 90s, 10m."""
    stage_env: bool = False
    """Start the ranks from a copy of this Python environment on each node's own disk."""
    python: Path | None = None
    """Interpreter of your own environment, ENV/bin/python, for the ranks of your own script: it needs torch alone.
    Default: this one, or in a container its python3."""
    container: Annotated[str | None, tyro.conf.arg(metavar="SIF")] = None
    """Apptainer image for the ranks of your own script."""


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Those of a training, but for the trainer's own."""

    pack: Literal["off", "on", "auto"] = "off"
    """Decode an image folder once on every node and train from the pixels (docs/how-to/pack-images.md).
    Random crops are then taken from the centre square of each image. auto: if the run has enough epochs to pay."""
    pack_size: int | None = None
    """Side of these squares in pixels. Default: 8/7 of the model's image size, such as 256 for 224."""
    recipe: RecipeName = None


@dataclass(frozen=True, kw_only=True)
class ScriptFlags:
    """Those of a user's script."""

    data: Path | None = None
    """Directory or archive to stage on every node; the script finds it, unpacked, in TORCHRELAY_DATA."""
    include: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Files for the copy of the code that git does not track, as a pattern in quotes: 'configs/**/*.yaml'.
    Of a directory, all files."""
    no_snapshot: bool = False
    """Run the script where it is, as it is when an attempt starts, instead of a copy of the code."""


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(RunFlags, cli.Common):
    """The flags of every submission."""

    resources: tyro.conf.OmitArgPrefixes[Resources] = field(default_factory=Resources)
    recovery: tyro.conf.OmitArgPrefixes[Recovery] = field(default_factory=Recovery)
    network: tyro.conf.OmitArgPrefixes[Network] = field(default_factory=Network)
    notification: tyro.conf.OmitArgPrefixes[Notification] = field(default_factory=Notification)
    dry_run: bool = False
    """Check everything, ask sbatch too, print the script alone."""
    wait: bool = False
    """Wait until the run ends, and print its result."""
    help_train: bool = False
    """Show the other flags: training, staging, network, messages, trackers."""


@dataclass(frozen=True, kw_only=True)
class SubmitTraining(TrainingFlags, SubmitOptions):
    """Submit a training run to Slurm and keep it going until it is complete.

    For example:
      hpc submit --recipe fashion-mnist
      hpc submit -N 2 --gpus-per-node a100:4 -t 12h --data /shared/imagenet --model resnet50
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]


@dataclass(frozen=True, kw_only=True)
class _SubmitHelp(SubmitTraining):
    __doc__ = SubmitTraining.__doc__

    # For its usage line: `split_script` takes what stands behind `--`, before tyro sees it.
    script: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[-- script.py ARGS]")]] = ()
    """Your own torchrun script with its arguments, or -m and a module, instead of the image classifier."""


@dataclass(frozen=True, kw_only=True)
class SubmitScript(ScriptFlags, SubmitOptions):
    """Submit your own torchrun script to Slurm and keep it going until it exits with 0."""


def split_script(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The flags, and the user's script with its arguments, which stand behind `--`."""
    if "--" not in arguments:
        return arguments, ()
    split = arguments.index("--")
    flags, script = arguments[:split], tuple(arguments[split + 1 :])
    return (flags if script else [*flags, "--"]), script  # tyro refuses a `--` with nothing behind it


def options_for(script: tuple[str, ...]) -> type[SubmitOptions]:
    """The flags that a submission with this script has; an empty one is a training's."""
    return SubmitScript if script else SubmitTraining


def options_for_help(arguments: list[str], script: tuple[str, ...]) -> type[SubmitOptions]:
    """`options_for`, or, if these arguments ask for help, what it shows."""
    asked = not {"-h", "--help", "--help-train"}.isdisjoint(arguments)
    return _SubmitHelp if asked and not script else options_for(script)


def flag_names(options: type[SubmitOptions]) -> dict[str, bool]:
    """The flags that a --config file may set; True for switches."""
    not_in_files = {"config", "recipe", "help-train"}
    return {name: switch for name, switch in command_line.flag_names(options).items() if name not in not_in_files}


def is_everyday(flag: str) -> bool:
    """Whether `--help` shows a flag; `--help-train` shows the others."""
    return flag not in _RARE and (flag in _EVERYDAY or flag not in _TRAINING)


def run_verb(
    name: str,
    work: Callable[[Any], int],
    options: type[SubmitOptions],
    arguments: list[str],
    script: tuple[str, ...],
    hidden: Collection[str] = (),
) -> int:
    """Run a verb with the flags of a submission, whose help is in two parts: `--help`, and `--help-train`.

    The defaults and files of the user come first. No help shows the flags of `hidden` fields.
    """
    others = "--help-train" in arguments
    of_other_part = {field.name for field in program.flags(options) if is_everyday(field.name) == others}
    return cli.run(
        work,
        options,
        name,
        ["--help"] if others else arguments,
        expand=lambda given: with_defaults(given, flag_names(options_for(script))),
        shown=program.Help(hidden={*hidden, *of_other_part}),
    )


def with_defaults(arguments: list[str], known: Mapping[str, bool]) -> list[str]:
    """The arguments with the defaults, the flags of files and a training's data. Raises UserError if one is wrong."""
    typed = sbatch_flags.spelled_out(arguments, known)
    values = sbatch_variables.merged(flag_names(SubmitTraining), os.environ)
    if command_line.last_value(typed, "--cluster") == "local":
        values = {name: value for name, value in values.items() if name not in SLURM_FLAGS}
    given = command_line.with_config(typed, known, values)
    return command_line.with_data(given, known) if "synthetic" in known else given
