"""`hpc submit`, top to bottom: flags, checks, run directory, job. Runs on the login node.

Nothing is queued before every check has passed, and nothing is left behind if one fails.
"""

import dataclasses
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hpc import cli
from hpc.core import program
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.files import write_atomic
from hpc.core.git import is_listed_as_untracked
from hpc.core.kernel import start_time
from hpc.core.ledger import EventWriter
from hpc.core.node_info import torch_build
from hpc.core.nodedir import check_stage_dir
from hpc.core.rundir import RunDir
from hpc.core.text import visible
from hpc.core.units import duration_seconds
from hpc.notification.recipients import with_known_names
from hpc.slurm import client as slurm
from hpc.slurm.executor import SlurmExecutor, start_local
from hpc.spec import Network, Notification, Recovery, Resources, RunSpec, Service, check_run_name
from hpc.staging.python_environment import this_environment
from hpc.submit import checks, environment_archive, sbatch_flags, sbatch_variables, user_environment
from hpc.submit.cluster_choice import SLURM_FLAGS, ClusterFlag, choose_cluster, slurm_only, this_machine
from hpc.submit.code_copy import UserCode, code_in_place, copy_code, find_code
from hpc.submit.dry_run import show_dry_run
from hpc.submit.gpu_use import resolve_device
from hpc.submit.package_copy import keep_packages
from hpc.tracking.submission import at_trackers, check_ready
from training.config import command_line
from training.config.command_line import RecipeName
from training.config.device_choice import DeviceChoice
from training.config.model_names import check_model, resolve_weights
from training.config.rules import without_effect
from training.config.train_config import TrainConfig, check_world

# Deleting old copies and moving files may keep an agent busy for a moment.
_MIN_STAGE_SECONDS = 10
# What `--help` shows of the training; `--help-train` shows the other flags.
_EVERYDAY = {
    "data", "model", "weights", "epochs", "batch_size", "lr", "weight_decay", "amp", "num_workers", "seed", "recipe",
}  # fmt: skip
_TRAINING = {"pack", "pack_size", "recipe", *(field.name for field in dataclasses.fields(TrainConfig))}
_RARE = {
    "debug", "stage_keep", "stage_timeout", "python", "stage_env", "interface", "port_range", "notify",
    "notify_interruptions", "tracker",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(cli.Common):
    """The flags of every submission."""

    resources: tyro.conf.OmitArgPrefixes[Resources] = field(default_factory=Resources)
    recovery: tyro.conf.OmitArgPrefixes[Recovery] = field(default_factory=Recovery)
    network: tyro.conf.OmitArgPrefixes[Network] = field(default_factory=Network)
    notification: tyro.conf.OmitArgPrefixes[Notification] = field(default_factory=Notification)
    tracker: tyro.conf.UseAppendAction[tuple[Service, ...]] = ()
    """Send the metrics to Weights & Biases or MLflow (docs/tracking.md). Repeatable."""
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
    dry_run: bool = False
    """Check everything, ask sbatch too, print the script alone."""
    wait: bool = False
    """Wait until the run ends, and print its result."""
    help_train: bool = False
    """Show the other flags: training, staging, network, messages, trackers."""
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
class SubmitTraining(SubmitOptions):
    """Submit a training run to Slurm and keep it going until it is complete.

    For example:
      hpc submit --recipe fashion-mnist
      hpc submit -N 2 --gpus-per-node a100:4 -t 12h --data /shared/imagenet --model resnet50

    Your own torchrun script instead of the image classifier:
      hpc submit [OPTIONS] -- script.py ARGS
    """

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    pack: Literal["off", "on", "auto"] = "off"
    """Decode an image folder once on every node and train from the pixels (docs/packing.md).
    Random crops are then taken from the centre square of each image. auto: if the run has enough epochs to pay."""
    pack_size: int | None = None
    """Side of these squares in pixels. Default: 8/7 of the model's image size, such as 256 for 224."""
    recipe: RecipeName = None


@dataclass(frozen=True, kw_only=True)
class SubmitScript(SubmitOptions):
    """Submit your own torchrun script to Slurm and keep it going until it exits with 0."""

    data: Path | None = None
    """Directory or archive to stage on every node; the script finds it, unpacked, in TORCHRELAY_DATA."""
    include: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Files for the copy of the code that git does not track, as a pattern in quotes: 'configs/**/*.yaml'.
    Of a directory, all files."""
    no_snapshot: bool = False
    """Run the script where it is, as it is when an attempt starts, instead of a copy of the code."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    script: tuple[str, ...] = ()
    if "--" in arguments:
        split = arguments.index("--")
        arguments, script = arguments[:split], tuple(arguments[split + 1 :])
        if not script:
            arguments.append("--")  # tyro refuses it
    options = SubmitScript if script else SubmitTraining
    others = "--help-train" in arguments
    return cli.run(
        lambda parsed: submit(parsed, script),
        options,
        "submit",
        ["--help"] if others else arguments,
        expand=lambda given: _expand(given, flag_names(options)),
        hidden={field.name for field in program.flags(options) if _is_everyday(field.name) == others},
    )


def flag_names(options: type[SubmitOptions]) -> dict[str, bool]:
    """The flags that a --config file may set; True for switches."""
    not_in_files = {"config", "recipe", "help-train"}
    return {name: switch for name, switch in command_line.flag_names(options).items() if name not in not_in_files}


def _is_everyday(flag: str) -> bool:
    return flag not in _RARE and (flag in _EVERYDAY or flag not in _TRAINING)


def _expand(arguments: list[str], known: Mapping[str, bool]) -> list[str]:
    """The arguments with the defaults and the flags of files."""
    typed = sbatch_flags.spelled_out(arguments, known)
    values = sbatch_variables.merged(flag_names(SubmitTraining), os.environ)
    if command_line.last_value(typed, "--cluster") == "local":
        values = {name: value for name, value in values.items() if name not in SLURM_FLAGS}
    return command_line.with_config(typed, known, values)


def submit(
    options: SubmitOptions, script: tuple[str, ...], fill: Callable[[RunDir, RunSpec], RunSpec] = lambda _, spec: spec
) -> int:
    """Check, make the run directory, submit; with --wait, wait for the end.

    `fill` puts into the new directory what the run begins with, and returns the spec with it (`hpc fork`).
    """
    # What the run is made of must be writable by its user alone (hpc.core.ownership). The job inherits this.
    os.umask(os.umask(0) | 0o022)
    run, spec = plan(options, script)
    code = _find_code(options, spec)
    spec = dataclasses.replace(spec, script=code.script, in_place=str(code.root) if code.in_place else None)
    _warn(options, spec, code)
    environment = this_environment() if options.stage_env else None
    on_slurm = spec.cluster == "slurm"
    answer: dict[str, object] = {
        "run": run.name, "run_dir": str(run.path), "job_id": None, "cluster": spec.cluster,
        "script": str(run.script) if on_slurm else None,
    }  # fmt: skip
    if options.dry_run:
        show_dry_run(run, spec, answer, as_json=options.json)
        return 0
    if environment is not None:
        watch = None if options.json else environment_archive.show_progress
        archive = environment_archive.find_or_make(environment, run.path.parent, watch)
        spec = dataclasses.replace(spec, stage_env=str(archive))
    with new_run_directory(run), at_trackers(run, spec) as known:
        run.events.mkdir()
        run.logs.mkdir()
        spec = fill(run, known)
        spec.save(run)
        copy_code(run, code)
        answer["job_id"] = job_id = SlurmExecutor(run, spec).start() if on_slurm else start_local(run)
    _record_submission(run, spec, job_id)
    _prepare_later_runs(run)
    if not options.json:
        print(_first_line(run, spec, job_id), flush=True)
    if options.wait:
        # Draws with rich: a mere submission need not load it.
        from hpc.status.__main__ import wait_for_end  # noqa: PLC0415

        return wait_for_end(run, answer if options.json else None)
    if options.json:
        cli.print_json(answer)
    else:
        _print_next(run, options.runs_dir)
    return 0


def _first_line(run: RunDir, spec: RunSpec, job_id: str) -> str:
    # With --gpus-per-node 0 on Slurm, nothing else is expected.
    on_cpu = spec.device != "cuda" and (spec.cluster == "local" or spec.resources.num_gpus > 0)
    where = "; its ranks use the CPU" if on_cpu else ""
    if spec.cluster == "slurm":
        return f"submitted run {run.name} as job {job_id}{where}"
    return f"started run {run.name} on {this_machine()}, as process {job_id}{where}"


def _warn(options: SubmitOptions, spec: RunSpec, code: UserCode) -> None:
    warnings = checks.runs_dir_warnings(options.runs_dir, on_cluster=spec.cluster == "slurm")
    if spec.cluster == "local":
        warnings += [f"{flag} has no effect: --cluster local has no Slurm" for flag in slurm_only(options.resources)]
    if missing := code.missing_imports():
        names = shlex.join(os.path.relpath(code.root / name) for name in missing)
        warnings.append(
            f"{visible(code.script[0])} imports files that git does not track, so the run will not have them: type "
            f"git add {names}, or use --include"
        )
    for warning in [*warnings, *(without_effect(spec.train) if spec.train else [])]:
        print(f"hpc submit: warning: {warning}", file=sys.stderr)


def _find_code(options: SubmitOptions, spec: RunSpec) -> UserCode:
    """The code of the run. Raises UserError if it would not have its script."""
    if not isinstance(options, SubmitScript) or not options.no_snapshot:
        return find_code(Path.cwd(), spec.script, spec.include, options.runs_dir)
    if options.include:
        raise UserError("--include is for the copy of the code, which --no-snapshot does without: leave one out")
    if spec.cluster == "slurm":
        checks.check_is_shared("--no-snapshot: the script in", Path(spec.script[0]).parent)
    return code_in_place(Path.cwd(), spec.script)


def _prepare_later_runs(run: RunDir) -> None:
    """Keep our packages for them, and have git ignore the runs of a repository. The run does not depend on it."""
    try:
        keep_packages(run)
        if is_listed_as_untracked(run.path):
            write_atomic(run.path.parent / ".gitignore", "*\n")
    except OSError as error:
        print(f"hpc submit: warning: {run.path.parent} cannot be written: {error}", file=sys.stderr)


def _print_next(run: RunDir, runs_dir: Path) -> None:
    flags = [] if runs_dir == Path("runs") else ["--runs-dir", str(runs_dir)]
    print(f"  {run.path}\nnext:")
    for verb in ("status", "logs --follow", "cancel"):
        print(f"  {cli.own_command()} {verb} {shlex.join([run.name, *flags])}")


def plan(options: SubmitOptions, script: tuple[str, ...]) -> tuple[RunDir, RunSpec]:
    """Check everything, and resolve the flags to a run. Raises UserError at the first mistake."""
    if options.name is not None:
        check_run_name(options.name)
    train, data = _resolve_work(options, script)
    pack = None
    if isinstance(options, SubmitTraining) and train is not None:
        pack = checks.pack_size(options.pack, options.pack_size, train)
        checks.check_data_on_device(train)
    in_terminal = sys.stdin is not None and sys.stdin.isatty()  # a daemon may have closed it
    cluster = choose_cluster(options.cluster, options.resources, in_terminal=in_terminal)
    checks.check_setup(options.resources.setup, cluster)
    if cluster == "slurm":
        resources = checks.resolve_resources(options.resources, slurm.partitions(), options.recovery.spares)
        checks.check_is_shared("--data", data)
        checks.check_is_shared("--weights", Path(train.weights) if train and train.weights else None)
    else:
        resources = checks.local_resources(options.resources)
    if train is not None:
        check_world(train, resources.max_nodes * resources.ranks_per_node)
    checks.check_runs_dir(options.runs_dir, on_cluster=cluster == "slurm")
    for flag, value in (("--container", options.container), ("--python", options.python)):
        user_environment.check_use(flag, value, trains=train is not None, stages=options.stage_env)
    image, python = user_environment.resolve(
        options.container, options.python, resources.setup, on_cluster=cluster == "slurm"
    )
    # Of the user's own environment, torch is not known before it runs.
    build = None if python or image else torch_build()
    device = resolve_device(options.device, resources.num_gpus, cluster, build)
    kind = train.model if train else Path(script[0]).stem
    name = options.name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunDir(options.runs_dir.expanduser().resolve() / name)
    if os.path.lexists(run.path):
        raise UserError(f"run {name!r} exists already in {options.runs_dir}: choose another --name")
    spec = RunSpec(
        name=run.name, cluster=cluster, resources=resources, data=str(data) if data else None, train=train,
        script=script, pack=pack, stage_dir=check_stage_dir(str(options.stage_dir)),
        stage_keep=options.stage_keep, stage_timeout=options.stage_timeout, recovery=options.recovery,
        network=options.network, notification=with_known_names(options.notification),
        tracker=tuple(dict.fromkeys(options.tracker)), id=secrets.token_hex(4),
        recipe=getattr(options, "recipe", None), python=python, container=image, device=device,
        include=getattr(options, "include", ()),
    )  # fmt: skip
    checks.check_recovery(spec)
    for service in spec.tracker:
        check_ready(service)
    duration_seconds("--stage-keep", spec.stage_keep)
    if spec.stage_timeout_seconds < _MIN_STAGE_SECONDS:
        raise UserError(f"--stage-timeout is {spec.stage_timeout}: use {_MIN_STAGE_SECONDS}s or more")
    return run, spec


def _resolve_work(options: SubmitOptions, script: tuple[str, ...]) -> tuple[TrainConfig | None, Path | None]:
    """The trainer's flags, None for a user's script, and the data to stage."""
    if isinstance(options, SubmitTraining):
        check_model(options.train.model)
        data = checks.training_data(options.train)
        # The path of the weights: the nodes may have another cache than this machine.
        weights = options.train.weights and str(resolve_weights(options.train.model, options.train.weights))
        return dataclasses.replace(options.train, data=str(data or ""), weights=weights), data
    checks.check_script(script)
    given = options.data if isinstance(options, SubmitScript) else None
    return None, checks.script_data(given) if given else None


@contextmanager
def new_run_directory(run: RunDir) -> Iterator[None]:
    """Make the directory, the user's alone; removed if the submission fails. Raises UserError if it cannot be made.

    Of the directories above it, those that were made for it are removed too, unless other runs are in them by then.
    """
    made = [directory for directory in run.path.parents if not directory.exists()]
    try:
        _make_directory(run.path)
    except FileExistsError as error:
        raise UserError(f"run {run.name!r} exists already in {run.path.parent}: choose another --name") from error
    except OSError as error:
        _remove_empty(made)
        raise _cannot_write(run, error) from error
    try:
        yield
    except BaseException as error:
        # After Ctrl-C, a job may have been queued once there is a script, and needs the directory.
        if isinstance(error, (UserError, OSError)) or not run.script.exists():
            shutil.rmtree(run.path, ignore_errors=True)
            _remove_empty(made)
        if isinstance(error, OSError):
            raise _cannot_write(run, error) from error
        raise


def _make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another submission, which failed, may just have removed the parent that it had made.
        with suppress(FileNotFoundError):
            # Who can write to it can run code as the user.
            path.mkdir(mode=0o700)
            return


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, the innermost first, as far as they are empty."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _cannot_write(run: RunDir, error: OSError) -> UserError:
    return UserError(f"--runs-dir {run.path.parent} is not writable: {error}")


def _record_submission(run: RunDir, spec: RunSpec, job_id: str) -> None:
    grace_seconds = None
    if spec.cluster == "slurm" and spec.resources.partition is not None:
        with suppress(TorchrelayError):  # without it, `hpc status` lacks a warning
            grace_seconds = slurm.grace_seconds(slurm.show_partition(spec.resources.partition))
    EventWriter(run.events / "submit.jsonl").append(
        "submitted",
        job_id=job_id,
        cluster=spec.cluster,
        started=start_time(job_id) if spec.cluster == "local" else None,
        stop_lead_seconds=spec.stop_lead_seconds,
        grace_seconds=grace_seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
