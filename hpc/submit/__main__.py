"""`hpc submit`: check everything, make the run directory, hand the job to the cluster.

Runs on the login node. Nothing is queued before every check has passed, and nothing is left behind if one fails.
"""

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from hpc import cli
from hpc.core.errors import TorchrelayError, UserError
from hpc.core.kernel import start_time
from hpc.core.ledger import EventWriter
from hpc.core.rundir import RunDir
from hpc.core.units import duration_seconds
from hpc.slurm import client as slurm
from hpc.slurm.executor import SlurmExecutor, agent_command, start_local
from hpc.spec import Cluster, Recovery, Resources, RunSpec, check_run_name
from hpc.staging.python_environment import this_environment
from hpc.staging.source import ARCHIVES, is_archive
from hpc.submit import checks, environment_archive
from hpc.submit.run_directory import fill, new_run, new_run_directory
from training.config import config_file
from training.config.command_line import RecipeName
from training.config.model_names import check_model
from training.config.pretrained import resolve_weights
from training.config.rules import without_effect
from training.config.train_config import TrainConfig, check_world


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(cli.Common):
    """Submit a training run to Slurm and keep it going until it is complete."""

    resources: tyro.conf.OmitArgPrefixes[Resources] = field(default_factory=Resources)
    recovery: tyro.conf.OmitArgPrefixes[Recovery] = field(default_factory=Recovery)
    name: str | None = None
    """Name of the run and its directory; by default the model's or script's with the time."""
    runs_dir: Path = Path("runs")
    """Directory of the runs, on storage that all nodes share."""
    cluster: Literal["auto", "slurm", "local"] = "auto"
    """Slurm, or this machine alone with one task per pretended node. `auto`: Slurm where there is one."""
    config: Path | None = None
    """YAML file of flags. It overrides --recipe; the command line overrides both."""
    stage_dir: Path = Path("/tmp")  # noqa: S108 - node-local is what it is for; the directory below it is private
    """Directory on each node's own disk for the copy of the data."""
    stage_keep: str = "7d"
    """How long copies there that no run uses are kept, for the next attempt: 0s, 12h, 30d. The least recently used go
    earlier when the disk is full."""
    stage_env: bool = False
    """Pack this Python environment, once, and have every node start its ranks from a copy on its own disk."""
    dry_run: bool = False
    """Check everything and print the script, but submit nothing."""
    wait: bool = False
    """Wait until the run is complete, and show how it went."""


@dataclass(frozen=True, kw_only=True)
class SubmitTraining(SubmitOptions):
    """Submit a training run to Slurm and keep it going until it is complete."""

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    pack: Literal["off", "on", "auto"] = "off"
    """Decode the images of a folder once on every node, and train from the pixels (docs/packing.md): random crops are
    then cut from their middle squares. `auto`: if there are enough epochs for that to pay."""
    pack_size: int | None = None
    """Side of these squares in pixels; by default 8/7 of the size that the model sees: 256 for 224."""
    recipe: RecipeName = None


@dataclass(frozen=True, kw_only=True)
class SubmitScript(SubmitOptions):
    """Submit your own torchrun script (`-- script.py ARGS`) to Slurm and keep it going until it has exited with 0."""

    data: Path | None = None
    """Directory or archive to stage on every node; the script finds it, unpacked, in TORCHRELAY_DATA."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    script: tuple[str, ...] = ()
    if "--" in arguments:
        split = arguments.index("--")
        arguments, script = arguments[:split], tuple(arguments[split + 1 :])
        if not script:
            arguments.append("--")  # tyro says what is wrong with it
    options = SubmitScript if script else SubmitTraining
    return cli.run(
        lambda parsed: submit(parsed, script),
        options,
        arguments,
        "submit",
        expand=lambda given: config_file.with_config(given, flag_names(options)),
    )


def flag_names(options: type[SubmitOptions]) -> dict[str, bool]:
    """The flags that may stand in a file, all but those that name files; True for switches."""
    owners = (options, Resources, Recovery, *([TrainConfig] if options is SubmitTraining else []))
    no_flags = {"resources", "recovery", "train", "config", "recipe"}
    return {name: switch for name, switch in config_file.flag_names(*owners).items() if name not in no_flags}


def submit(options: SubmitOptions, script: tuple[str, ...]) -> int:
    """Check, make the run directory, submit, and wait if asked to."""
    run, spec = plan(options, script)
    for told in without_effect(spec.train) if spec.train else []:
        print(f"hpc submit: warning: {told}", file=sys.stderr)
    environment = this_environment() if options.stage_env else None
    if options.dry_run:
        return _print_plan(options, run, spec)
    if environment is not None:
        watch = environment_archive.no_progress if options.json else environment_archive.show_progress
        archive = environment_archive.find_or_make(environment, run.path.parent, watch, cli.all_runs)
        spec = dataclasses.replace(spec, stage_env=str(archive))
    with new_run_directory(run):
        fill(run, spec)
        job_id = SlurmExecutor(run, spec).start() if spec.cluster == "slurm" else start_local(run)
    _record(run, spec, job_id)
    answer = _answer(run, spec, job_id)
    if not options.wait:
        cli.print_json(answer) if options.json else _print_next_steps(run, job_id, options)
        return 0
    from hpc.status import wait  # noqa: PLC0415 - draws with rich, which a mere submission need not load

    return wait.wait_for_end(run, answer if options.json else None)


def _record(run: RunDir, spec: RunSpec, job_id: str) -> None:
    """Write down which job it is, and the times that Slurm gives it to save."""
    EventWriter(run.events / "submit.jsonl").append(
        "submitted",
        job_id=job_id,
        cluster=spec.cluster,
        started=start_time(job_id) if spec.cluster == "local" else None,
        stop_lead_seconds=spec.stop_lead_seconds,
        grace_seconds=_grace_seconds(spec),
    )


def _grace_seconds(spec: RunSpec) -> int | None:
    if spec.cluster == "local" or spec.resources.partition is None:
        return None
    try:
        return slurm.grace_seconds(slurm.show_partition(spec.resources.partition))
    except TorchrelayError:
        return None  # the job is in the queue: what is missing is a warning


def plan(options: SubmitOptions, script: tuple[str, ...]) -> tuple[RunDir, RunSpec]:
    """Everything that is checked before the queue sees the run.

    Raises:
        UserError: the first thing that is wrong.
    """
    if options.name is not None:
        check_run_name(options.name)
    train, data = _check_work(options, script)
    pack = None
    if isinstance(options, SubmitTraining) and train is not None:
        pack = checks.pack_size(options.pack, options.pack_size, train)
        checks.check_data_on_device(train)
    cluster = choose_cluster(options.cluster)
    if cluster == "slurm":
        resources = checks.resolve_resources(options.resources, slurm.partitions(), options.recovery.spares)
    else:
        resources = checks.local_resources(options.resources)
    if train is not None:
        check_world(train, resources.max_nodes * resources.gpus_per_node)
    checks.check_runs_dir(options.runs_dir, on_cluster=cluster == "slurm")
    if data is not None and cluster == "slurm":
        checks.check_is_shared("--data", data)
    if train is not None and train.weights and cluster == "slurm":
        checks.check_is_shared("--weights", Path(train.weights))
    kind = train.model if train else Path(script[0]).stem
    run = new_run(options.runs_dir, options.name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}")
    spec = RunSpec(
        name=run.name, cluster=cluster, resources=resources, data=str(data) if data else None, train=train,
        script=script, pack=pack, stage_dir=str(options.stage_dir.absolute()),
        stage_keep=options.stage_keep, recovery=options.recovery, recipe=getattr(options, "recipe", None),
    )  # fmt: skip
    checks.check_recovery(spec)
    duration_seconds("--stage-keep", spec.stage_keep)
    return run, spec


def _check_work(options: SubmitOptions, script: tuple[str, ...]) -> tuple[TrainConfig | None, Path | None]:
    """The trainer's flags, if it is the trainer that runs, and where the data are."""
    if isinstance(options, SubmitTraining):
        check_model(options.train.model)
        data = checks.training_data(options.train)
        # The file of the weights: the nodes may have another cache.
        weights = options.train.weights and str(resolve_weights(options.train.model, options.train.weights))
        return dataclasses.replace(options.train, data=str(data or ""), weights=weights), data
    checks.check_script(script)
    given = options.data if isinstance(options, SubmitScript) else None
    if given is not None and is_archive(given):
        checks.check_archive(given)
    elif given is not None and not given.is_dir():
        raise UserError(
            f"--data is {given}, which is no directory and no archive ({', '.join(ARCHIVES)}): give one to stage, or "
            "leave it out"
        )
    return None, given.absolute() if given else None


def choose_cluster(asked: str) -> Cluster:
    """The cluster to run on.

    Raises:
        UserError: `--cluster slurm`, and there is none.
    """
    if asked == "local" or (asked == "auto" and not slurm.is_available()):
        return "local"
    if not slurm.is_available():
        raise UserError(
            "--cluster slurm, but there is no Slurm here (no sbatch, or no slurm.conf): use --cluster local"
        )
    return "slurm"


def _answer(run: RunDir, spec: RunSpec, job_id: str | None) -> dict[str, object]:
    """The contract's JSON document."""
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "job_id": job_id,
        "cluster": spec.cluster,
        "script": str(run.script) if spec.cluster == "slurm" else None,
    }


def _print_plan(options: SubmitOptions, run: RunDir, spec: RunSpec) -> int:
    text = SlurmExecutor(run, spec).script() if spec.cluster == "slurm" else agent_command(run) + "\n"
    cli.print_json({**_answer(run, spec, None), "text": text}) if options.json else print(text, end="")
    return 0


def _print_next_steps(run: RunDir, job_id: str, options: SubmitOptions) -> None:
    where = [] if options.runs_dir == Path("runs") else ["--runs-dir", str(options.runs_dir)]
    print(f"submitted run {run.name} as job {job_id}\n  {run.path}\nnext:")
    for verb in ("status", "logs --follow", "cancel"):
        print(f"  {cli.own_command()} {verb} {shlex.join([run.name, *where])}")


if __name__ == "__main__":
    sys.exit(main())
