"""Checks a submission and resolves its flags to a run. Makes no run directory. Runs on the login node."""

import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import expanded
from hpc.base.text import visible
from hpc.commands import cli
from hpc.run.nodedir import check_stage_dir
from hpc.run.rundir import RunDir, check_run_name
from hpc.run.spec import Cluster, RunSpec
from hpc.services.notification.recipients import with_known_names
from hpc.services.tracking.opening import tracker_of
from hpc.slurm import squeue
from hpc.slurm.predecessors import dependency
from hpc.submissions import checks
from hpc.submissions.options import SubmitOptions
from hpc.submissions.resources import choose_cluster, complete, resolve_device, slurm_only
from hpc.submissions.user_code.own_code import UserCode, find_code
from hpc.submissions.user_code.script_hints import warnings_of_code
from hpc.submissions.user_python import user_environment


def plan(options: SubmitOptions) -> tuple[RunDir, RunSpec]:
    """Check all flags, and return the run directory and the spec for them. Raises UserError at the first mistake."""
    if options.name is not None:
        check_run_name(options.name)
    resolved = options.program.resolve()
    is_script = resolved.program.isolated
    in_terminal = sys.stdin is not None and sys.stdin.isatty()  # a daemon may have closed it
    cluster = choose_cluster(options.cluster, options.resources, in_terminal=in_terminal)
    checks.check_setup(options.resources.setup, cluster)
    resources = complete(options.resources, cluster, options.recovery.spares)
    for flag, path in {"--data": resolved.data, **resolved.files}.items() if cluster == "slurm" else ():
        checks.check_is_shared(flag, path)
    checks.check_runs_dir(options.runs_dir, on_cluster=cluster == "slurm")
    for flag, value in (("--container", options.container), ("--python", options.python)):
        user_environment.check_use(flag, value, trains=not is_script, stages=options.stage_env)
    found = None if not is_script or options.stage_env else user_environment.find_python()
    image, python, build = user_environment.resolve(
        options.container, options.python, resources.setup, on_cluster=cluster == "slurm", found=found
    )
    device = resolve_device(options.device, resources.gpus_per_node.count, cluster, build)
    # With --device auto, GPUs that were requested but cannot exist (a testbed, no driver) leave the ranks on CPUs.
    has_gpus = device == "cuda" or (device == "auto" and not resources.gpus_per_node.count)
    options.program.check_ranks(resources.nodes.most * resources.ranks_per_node, has_gpus=has_gpus)
    runs_dir = expanded(options.runs_dir).resolve()
    name = options.name or _free_name(runs_dir, resolved.name)
    run = RunDir(runs_dir / name)
    if os.path.lexists(run.path):
        raise UserError(f"run {name!r} exists already in {options.runs_dir}: choose another --name")
    spec = RunSpec(
        name=run.name, cluster=cluster, resources=resources,
        data=str(resolved.data) if resolved.data else None, program=resolved.program,
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
        tracker_of(service).check()
    # An agent may be busy for a moment with deleting old copies and moving files.
    if spec.stage_timeout.seconds < 10:
        raise UserError(f"--stage-timeout is {spec.stage_timeout}: use 10s or more")
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


def code_of(options: SubmitOptions) -> UserCode:
    """Return the user's code. Raises UserError if it lacks the script."""
    flags, has_own = options.program, options.python or options.container
    # This process cannot see the modules of the script's own environment, be it typed or active.
    elsewhere = bool(has_own or (not options.stage_env and user_environment.find_python()))
    return find_code(Path.cwd(), flags.script, options.runs_dir, elsewhere=elsewhere, in_place=flags.in_place)


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
        UserError: classes of the data do not fit together.
    """
    warnings = list[str]()
    if spec.cluster == "local":
        warnings += [f"{flag} has no effect: --cluster local has no Slurm" for flag in slurm_only(options.resources)]
    warnings += warnings_of_code(code, on_cluster=spec.cluster == "slurm")
    warnings += options.program.warnings()
    for warning in warnings:
        print(visible(f"hpc submit: warning: {warning}"), file=sys.stderr)
