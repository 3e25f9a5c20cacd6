"""Checks a submission and resolves its flags to a run. Makes no run directory. Runs on the login node."""

import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc.base.errors import TorchrelayError, UserError, need_classifier
from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.nodedir import check_stage_dir
from hpc.run.rundir import RunDir, check_run_name
from hpc.run.spec import Cluster, RunSpec
from hpc.run.spec_file import script_program
from hpc.services.notification.recipients import with_known_names
from hpc.services.tracking.submission import check_ready
from hpc.slurm import sinfo, squeue
from hpc.slurm.predecessors import dependency
from hpc.submissions import checks, data_checks, resolve
from hpc.submissions.cluster_choice import choose_cluster, slurm_only
from hpc.submissions.options import SubmitOptions, SubmitScript, SubmitTraining
from hpc.submissions.user_code.code_notes import warnings_of_code
from hpc.submissions.user_code.own_code import UserCode, code_in_place, find_code, own_environment
from hpc.submissions.user_python import user_environment
from training.config.model_names import check_model, resolve_weights
from training.config.rules import without_effect
from training.config.train_config import check_world
from training.config.training_spec import Training, trainer_program

# The shortest --stage-timeout, because an agent may be busy for a moment with deleting old copies and moving files.
_MIN_STAGE_SECONDS = 10


def plan(options: SubmitOptions, script: tuple[str, ...]) -> tuple[RunDir, RunSpec]:
    """Check all flags, and return the run directory and the spec for them. Raises UserError at the first mistake."""
    if options.name is not None:
        check_run_name(options.name)
    train = training = pack = None
    if isinstance(options, SubmitTraining):
        training, data = _training_of(options)
        train, program = training.train, trainer_program(training.train, has_data=data is not None)
        pack = data_checks.pack_size(options.pack, options.pack_size, train)
        data_checks.check_data_on_device(train)
    else:
        data, program = _script_data(options, script), script_program(script)
    in_terminal = sys.stdin is not None and sys.stdin.isatty()  # a daemon may have closed it
    cluster = choose_cluster(options.cluster, options.resources, in_terminal=in_terminal)
    checks.check_setup(options.resources.setup, cluster)
    if cluster == "slurm":
        resources = resolve.resolve_resources(options.resources, sinfo.partitions(), options.recovery.spares)
        checks.check_is_shared("--data", data)
        checks.check_is_shared("--weights", Path(train.weights) if train and train.weights else None)
    else:
        resources = resolve.local_resources(options.resources)
    if train:
        check_world(train, resources.nodes.most * resources.ranks_per_node)
    checks.check_runs_dir(options.runs_dir, on_cluster=cluster == "slurm")
    for flag, value in (("--container", options.container), ("--python", options.python)):
        user_environment.check_use(flag, value, trains=bool(train), stages=options.stage_env)
    found = None if train or options.stage_env else user_environment.find_python()
    image, python = user_environment.resolve(
        options.container, options.python, resources.setup, on_cluster=cluster == "slurm", found=found
    )
    # The torch of the user's own environment is unknown until the ranks run.
    build = None if python or image else user_environment.torch_build(None)
    device = resolve.resolve_device(options.device, resources.gpus_per_node.count, cluster, build)
    kind = train.model if train else _name_of(script)
    runs_dir = options.runs_dir.expanduser().resolve()
    name = options.name or _free_name(runs_dir, kind)
    run = RunDir(runs_dir / name)
    if os.path.lexists(run.path):
        raise UserError(f"run {name!r} exists already in {options.runs_dir}: choose another --name")
    spec = RunSpec(
        name=run.name, cluster=cluster, resources=resources, has_default_time=options.resources.time is None,
        data=str(data) if data else None, program=program, training=training, pack=pack,
        stage_dir=check_stage_dir(str(options.stage_dir)),
        stage_keep=options.stage_keep, stage_timeout=options.stage_timeout, recovery=options.recovery,
        network=options.network, notification=with_known_names(options.notification),
        tracker=tuple(dict.fromkeys(options.tracker)), id=secrets.token_hex(4),
        python=python, container=image, device=device,
        after=_directories("--after", options.after, options, cluster),
        after_ok=_directories("--after-ok", options.after_ok, options, cluster),
    )  # fmt: skip
    _check_predecessors(run, spec)
    checks.check_recovery(spec)
    for service in spec.tracker:
        check_ready(service)
    if spec.stage_timeout.seconds < _MIN_STAGE_SECONDS:
        raise UserError(f"--stage-timeout is {spec.stage_timeout}: use {_MIN_STAGE_SECONDS}s or more")
    return run, spec


def _free_name(runs_dir: Path, kind: str) -> str:
    """Return a name from the time in seconds. If a run has it, as in a loop of hpc submit, wait for the next second."""
    while os.path.lexists(runs_dir / (name := f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}")):
        time.sleep(0.1)
    return name


def _directories(flag: str, names: Sequence[str], options: SubmitOptions, cluster: Cluster) -> tuple[str, ...]:
    """Return the directories of the runs to wait for. Raises UserError if Slurm cannot wait for one."""
    found = [cli.find_own_run(name, options.runs_dir) for name in names]
    for run in found:
        if cluster == "local" or not run.script.exists():
            which = "this run" if cluster == "local" else f"run {run.name}"
            raise UserError(
                f"{flag} {run.name} needs Slurm, but {which} has --cluster local: type hpc submit when the other run "
                "has ended (hpc submit --wait waits for the end of a run)"
            )
    return tuple(str(run.path) for run in found)


def _check_predecessors(run: RunDir, spec: RunSpec) -> None:
    """Refuse to wait for a run that has no job or has failed, and --after together with --sbatch dependency=."""
    if not (spec.after or spec.after_ok):
        return
    if any(option.startswith("dependency=") for option in spec.resources.sbatch):
        raise UserError("--sbatch dependency= and --after are both given: use one of them")
    try:
        dependency(run, spec, squeue.jobs())
    except TorchrelayError as error:
        raise UserError(f"run {run.name} would never begin: {error}") from error


def _training_of(options: SubmitTraining) -> tuple[Training, Path | None]:
    """Return the classifier's part of the spec, and the data to stage."""
    need_classifier("a training without a script")
    check_model(options.train.model)
    data = data_checks.training_data(options.train)
    # The spec gets the path of the weights, because the nodes may have another cache than this machine.
    weights = options.train.weights and str(resolve_weights(options.train.model, options.train.weights))
    train = dataclasses.replace(options.train, data=str(data or ""), weights=weights)
    return Training(train=train, recipe=options.recipe), data


def _script_data(options: SubmitOptions, script: tuple[str, ...]) -> Path | None:
    """Check a script and its data. Returns the path of the data to stage; None without --data."""
    given = options.data if isinstance(options, SubmitScript) else None
    checks.check_script(script, has_data=given is not None)
    return data_checks.script_data(given) if given else None


def _name_of(script: tuple[str, ...]) -> str:
    """Return the first word of a script's default run name: `train` for `train.py` and for `-m package.train`."""
    return script[1].rpartition(".")[2] if script[0] == "-m" else Path(script[0]).stem


def find_user_code(options: SubmitOptions, spec: RunSpec) -> UserCode:
    """Return the user's code for the run. Raises UserError if it lacks the script."""
    elsewhere = own_environment(spec)
    if isinstance(options, SubmitScript) and options.in_place:
        return code_in_place(Path.cwd(), spec.script, elsewhere=elsewhere)
    return find_code(Path.cwd(), spec.script, options.runs_dir, elsewhere=elsewhere)


def check_place(run: RunDir, spec: RunSpec) -> None:
    """Raise UserError if a script that runs in place is not visible on the nodes."""
    if spec.in_place and spec.cluster == "slurm":
        start = spec.start_directory(run)
        checks.check_is_shared("--in-place: the working directory", start)
        if spec.script[0] != "-m":
            checks.check_is_shared("--in-place: the script in", (start / spec.script[0]).resolve().parent)


def warn(options: SubmitOptions, spec: RunSpec, code: UserCode) -> None:
    """Print warnings about flags, the code and the data on stderr.

    Raises:
        UserError: the file system of --runs-dir has no hard links, or classes of the data do not fit together.
    """
    warnings = checks.runs_dir_warnings(options.runs_dir, on_cluster=spec.cluster == "slurm")
    if spec.cluster == "local":
        warnings += [f"{flag} has no effect: --cluster local has no Slurm" for flag in slurm_only(options.resources)]
    warnings += warnings_of_code(code, on_cluster=spec.cluster == "slurm")
    if spec.train:
        warnings += without_effect(spec.train)
        warnings += data_checks.class_warnings(Path(spec.data)) if spec.data else []
    for warning in warnings:
        print(visible(f"hpc submit: warning: {warning}"), file=sys.stderr)
