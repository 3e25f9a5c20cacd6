"""RunSpec: everything that one run is, frozen and validated; the single source of every flag of `submit`.

Runs on the login node (made, checked) and on compute nodes (read back from `spec.json`). Imports no torch:
`training.config.train_config` is free of it.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import tyro

from hpc.core.errors import UserError
from hpc.core.files import write_json
from hpc.core.rundir import RunDir
from hpc.core.units import duration_seconds, stop_lead_seconds, walltime_minutes
from training.config.train_config import TrainConfig

Cluster = Literal["slurm", "local"]

# What submit decides itself: overriding one of these through --sbatch would break the run's contract.
MANAGED_SBATCH = {
    "nodes": "--nodes", "ntasks": "--nodes", "ntasks-per-node": "--gpus-per-node", "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-gpu", "mem": "--mem", "time": "--time", "partition": "--partition",
    "account": "--account", "qos": "--qos", "constraint": "--constraint", "exclude": "--exclude",
    "job-name": "--name", "output": "--runs-dir", "error": "--runs-dir", "open-mode": None, "requeue": None,
    "no-requeue": None, "no-kill": None, "signal": "--stop-lead", "array": None, "chdir": None, "export": None,
    "wrap": None,
}  # fmt: skip
_NODES = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")
_LONGEST_NAME = 100
# The requeue itself takes some of it; sbatch keeps the number in 16 bits.
_LEAST_LEAD_SECONDS, _MOST_LEAD_SECONDS = 15, 65535


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the job asks of the cluster."""

    nodes: str = "1"
    """Nodes: `N`, or `MIN:MAX` to take what is free between the two."""
    gpus_per_node: int = 1
    """GPUs, and so ranks, per node."""
    cpus_per_gpu: int | None = None
    """CPUs per GPU; by default a node's CPUs divided by its GPUs."""
    mem: str | None = None
    """Memory per node, as in Slurm: 64G. By default the partition's."""
    time: str | None = None
    """Time limit of one attempt: 12h, 90m, 1-12:00:00. By default a day, or the partition's limit if that is less."""
    partition: str | None = None
    """Partition; by default the cluster's."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features that the job needs."""
    exclude: str | None = None
    """Nodes to avoid: gpu01,gpu[07-09]."""
    sbatch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """KEY=VALUE, one more option for sbatch."""

    def __post_init__(self) -> None:
        """Check what can be checked without a cluster."""
        match = _NODES.fullmatch(self.nodes)
        if match is None or self.max_nodes < self.min_nodes:
            raise UserError(f"--nodes is {self.nodes!r}: use a number such as 2, or a range such as 2:4")
        for flag, value in (("--gpus-per-node", self.gpus_per_node), ("--cpus-per-gpu", self.cpus_per_gpu)):
            if value is not None and value < 1:
                raise UserError(f"{flag} is {value}: use 1 or more")
        if self.time is not None:
            walltime_minutes(self.time)
        for option in self.sbatch:
            _check_sbatch(option)

    @property
    def min_nodes(self) -> int:
        """The fewest nodes that the run starts with."""
        return int(self.nodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most nodes that the run can use."""
        return int(self.nodes.split(":")[-1])

    @property
    def cpus_per_node(self) -> int:
        """CPUs of the one task per node; `cpus_per_gpu` must be resolved by now."""
        return self.gpus_per_node * (self.cpus_per_gpu or 1)


def _check_sbatch(option: str) -> None:
    """Refuse an extra sbatch option that is malformed or ours."""
    key, separator, value = option.partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or not (separator and value) or "\n" in value:
        raise UserError(f"--sbatch {option!r} is not KEY=VALUE: write for example --sbatch mail-type=END")
    if key in MANAGED_SBATCH:
        flag = MANAGED_SBATCH[key]
        raise UserError(f"--sbatch {key} is ours to set: {f'use {flag}' if flag else 'remove it'}")


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How the run goes on after what interrupts it."""

    elastic: bool = False
    """Train on with the nodes that are left when some are lost: down to one, or to the MIN of `--nodes MIN:MAX`."""
    spares: int = 0
    """More nodes that wait in the job, to take a lost one's place."""
    hang_timeout: str = "auto"
    """How long ranks may show no progress before all are restarted: 90s, 5m. `auto`: by the measured time of a step.
    A script of your own has to give signs of life (docs/recovery.md)."""
    stop_lead: str | None = None
    """How long before the time limit the run is told to save: 2m. By default a tenth of it, 30 s to 5 minutes."""

    def __post_init__(self) -> None:
        """Check what can be checked without a cluster."""
        if self.spares < 0:
            raise UserError(f"--spares is {self.spares}: use 0 or more")
        if self.hang_timeout != "auto" and duration_seconds("--hang-timeout", self.hang_timeout) < 1:
            raise UserError(f"--hang-timeout is {self.hang_timeout}: use 1s or more, or auto")
        if self.stop_lead is not None:
            seconds = duration_seconds("--stop-lead", self.stop_lead)
            if not _LEAST_LEAD_SECONDS <= seconds <= _MOST_LEAD_SECONDS:
                raise UserError(f"--stop-lead is {self.stop_lead}: use {_LEAST_LEAD_SECONDS}s to 18h")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run, resolved: what `spec.json` holds."""

    name: str
    cluster: Cluster
    resources: Resources
    data: str | None
    """The directory that every node stages; None: there are none to read."""
    train: TrainConfig | None = None
    """Our trainer's flags; None: a script runs instead."""
    script: tuple[str, ...] = ()
    """The user's own torchrun script, by its path in the snapshot, and its arguments."""
    stage_dir: str
    """A directory on each node's own disk."""
    stage_keep: str = "7d"
    """How long a copy there is kept that nobody uses."""
    pack: int | None = None
    """Side in pixels of the images that the nodes train from, decoded once; None: from the files as they are."""
    stage_env: str | None = None
    """The packed environment that every node unpacks and starts its ranks from; None: the one that all nodes share."""
    recovery: Recovery = field(default_factory=Recovery)
    recipe: str | None = None
    """The recipe that the trainer's flags began with."""

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that a training which is under way goes on with."""
        return 1 if self.recovery.elastic and ":" not in self.resources.nodes else self.resources.min_nodes

    @property
    def job_nodes(self) -> tuple[int, int]:
        """The fewest and the most nodes of a job of this run, the spares among them."""
        return self.resources.min_nodes + self.recovery.spares, self.resources.max_nodes + self.recovery.spares

    @property
    def stop_lead_seconds(self) -> int:
        """Seconds before the time limit at which the run is told to save and make way."""
        if self.recovery.stop_lead is not None:
            return duration_seconds("--stop-lead", self.recovery.stop_lead)
        return stop_lead_seconds(walltime_minutes(self.resources.time or "1d"))

    def save(self, run: RunDir) -> None:
        """Write `spec.json`."""
        write_json(run.spec, asdict(self))

    @classmethod
    def load(cls, run: RunDir) -> "RunSpec":
        """Read `spec.json` back.

        Raises:
            UserError: the directory is no run.
        """
        try:
            fields: dict[str, Any] = json.loads(run.spec.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{run.path} is no run directory: {run.spec.name} cannot be read ({error})") from error
        try:
            return cls._of(fields)
        except (KeyError, TypeError) as error:
            raise UserError(f"{run.spec} is damaged or of another version: {error!r}") from error

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> "RunSpec":
        """From JSON."""
        fields["resources"]["sbatch"] = tuple(fields["resources"]["sbatch"])
        fields["resources"] = Resources(**fields["resources"])
        fields["recovery"] = Recovery(**fields.get("recovery", {}))
        fields["train"] = TrainConfig(**fields["train"]) if fields["train"] else None
        fields["script"] = tuple(fields["script"])
        return cls(**fields)


def check_run_name(name: str) -> None:
    """Refuse a name that cannot be one directory's, or that Slurm would rewrite.

    Raises:
        UserError: with the reason.
    """
    reason = None
    if not name or len(name) > _LONGEST_NAME:
        reason = f"it has {len(name)} characters; use 1 to {_LONGEST_NAME}"
    elif "/" in name or name in {".", ".."} or ".." in name:
        reason = "it must be one directory's name: no / and no .."
    elif not name.isprintable():
        reason = "it holds a newline or another control character"
    elif "%" in name or "\\" in name:
        reason = "Slurm replaces % and \\ in file names"
    elif name[0] in "-." or name != name.strip():
        reason = "it may not begin with - or . nor begin or end with a space"
    if reason:
        raise UserError(f"--name {name!r}: {reason}. Try --name {_suggest(name)}")


def _suggest(name: str) -> str:
    """A legal name close to an illegal one."""
    return re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", name).strip("-.")[:_LONGEST_NAME] or "my-run"
