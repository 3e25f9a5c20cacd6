"""Defines RunSpec, the resolved flags of one run as its spec file keeps them, and the flags of the run's job."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from hpc.base.errors import UserError
from hpc.base.files import write_json
from hpc.base.flags import Flag
from hpc.base.units import (
    Duration,
    DurationOrAuto,
    Gpus,
    Memory,
    NodeRange,
    PortRange,
    TimeLimit,
    TimeLimitOrAuto,
    Word,
)
from hpc.run.events.resumption import current_spec
from hpc.run.rundir import RunDir
from hpc.run.spec_file import Program, read_spec
from hpc.run.stop_times import REQUEUE_SECONDS, stop_lead_seconds

Cluster = Literal["slurm", "local"]
DeviceChoice = Literal["auto", "cuda", "cpu"]
"""Device of the ranks. `auto` means GPUs if torch can use any, else CPUs."""
Service = Literal["wandb", "mlflow"]
"""The trackers to which a run can send its metrics."""

# The options of sbatch that --sbatch may not set, with advice.
MANAGED_SBATCH = {
    **{name: f"use --{name} instead" for name in (
        "nodes", "gpus-per-node", "cpus-per-gpu", "mem", "time", "time-min", "partition", "account", "qos",
        "constraint", "exclude", "wait",
    )},
    **dict.fromkeys(("ntasks", "gpus"), "use --nodes and --gpus-per-node instead"),
    **dict.fromkeys(("ntasks-per-node", "gpus-per-task", "gpus-per-socket"), "use --gpus-per-node instead"),
    "cpus-per-task": "use --cpus-per-gpu instead", "job-name": "use --name instead",
    "output": "logs are in the run directory, use --runs-dir", "error": "logs are in the run directory, use --runs-dir",
    "open-mode": "logs are always appended to: leave it out", "requeue": "runs are always requeued: leave it out",
    "no-requeue": "runs are always requeued until hpc cancel: leave it out",
    "no-kill": "always set for several nodes: leave it out", "signal": "use --signal-before instead",
    "array": "job arrays are not supported: submit one run per setting",
    "hetjob": "heterogeneous jobs are not supported: submit one run, or one per kind of node",
    "chdir": "runs start in the current directory: change it before hpc submit",
    "export": "runs get the whole environment: set variables before hpc submit",
    "test-only": "use --dry-run instead",
    "wrap": "to run a script of your own, use -- script.py ARGS",
}  # fmt: skip
_SHORTEST_MINUTES = 10
_DEFAULT_LIMIT = TimeLimit(24 * 3600)  # of partitions that have none
# Limits of --signal-before: the requeue itself takes part of this time, and sbatch keeps the number in 16 bits.
_MIN_LEAD_SECONDS, _MAX_LEAD_SECONDS = 15, 65535
_STOP_SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of the Slurm job."""

    nodes: Annotated[NodeRange, Flag(metavar="N", letter="-N")] = NodeRange(1)
    """Number of nodes. MIN:MAX: as many as are free in this range."""
    gpus_per_node: Annotated[Gpus, Flag(metavar="N")] = Gpus(1)
    """GPUs per node, with one rank each, or TYPE:N such as a100:2. 0: one rank per node on its CPUs (gloo)."""
    cpus_per_gpu: Annotated[int | None, Flag(metavar="N")] = None
    """CPUs per rank. Default: a node's share per GPU."""
    mem: Annotated[Memory | None, Flag(metavar="SIZE")] = None
    """Memory per node: 64G. Default: the partition's."""
    time: Annotated[TimeLimit | None, Flag(metavar="TIME", letter="-t")] = None
    """Time limit of one attempt: 12h, 90m, 1-12:00:00. Default: the partition's, or at most a day if it has none."""
    time_min: Annotated[TimeLimitOrAuto | None, Flag(metavar="TIME")] = None
    """Let Slurm shorten --time to this if an attempt can then start sooner, in a gap between other jobs.
    auto: time to start and to save three times, at least 10m."""
    partition: Annotated[str | None, Flag(metavar="P", letter="-p")] = None
    """Partition. Default: the cluster's."""
    account: Annotated[str | None, Flag(metavar="NAME", letter="-A")] = None
    """Account to charge."""
    qos: Annotated[str | None, Flag(metavar="NAME")] = None
    """Quality of service."""
    constraint: Annotated[str | None, Flag(metavar="FEATURES")] = None
    """Required node features."""
    exclude: Annotated[str | None, Flag(metavar="NODES")] = None
    """Nodes to exclude: gpu01,gpu[07-09]."""
    sbatch: Annotated[tuple[str, ...], Flag(metavar="KEY[=VALUE]", is_repeatable=True)] = ()
    """Another option of sbatch: mail-type=END. Repeatable."""
    setup: Annotated[tuple[str, ...], Flag(metavar="LINE", is_repeatable=True)] = ()
    """Bash command to run first on the first node: 'module load cuda/12.4'. All ranks get its exports. Repeatable."""

    def __post_init__(self) -> None:
        """Check what can be checked without a cluster."""
        if self.cpus_per_gpu is not None and self.cpus_per_gpu < 1:
            raise UserError(f"--cpus-per-gpu is {self.cpus_per_gpu}: use 1 or more")
        for option in self.sbatch:
            key, separator, value = option.partition("=")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or bool(separator) != bool(value) or "\n" in value:
                raise UserError(f"--sbatch {option!r}: use KEY=VALUE, such as mail-type=END, or KEY, such as exclusive")
            if key in MANAGED_SBATCH:
                raise UserError(f"--sbatch {key}: {MANAGED_SBATCH[key]}")
            # --gpus-per-node sets the same field of the job, so sbatch would silently ignore --gres.
            if key == "gres" and self.gpus_per_node.count and re.search(r"(^|,)(gres:)?gpu\b", value):
                raise UserError(f"--sbatch {option}: use --gpus-per-node instead, for example --gpus-per-node a100:2")

    @property
    def time_limit(self) -> TimeLimit:
        """The time limit of an attempt; if `time` is None, the default for partitions that have none."""
        return self.time or _DEFAULT_LIMIT

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node: one per GPU, or one if the run uses no GPUs."""
        return self.gpus_per_node.count or 1

    @property
    def cpus_per_node(self) -> int:
        """CPUs of the one task per node. `cpus_per_gpu` must be resolved."""
        return self.ranks_per_node * (self.cpus_per_gpu or 1)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery from interruptions."""

    elastic: bool = False
    """When nodes are lost, continue on the remaining nodes: at least one, or MIN of --nodes MIN:MAX."""
    spares: Annotated[int, Flag(metavar="N")] = 0
    """Number of idle nodes to replace lost ones."""
    hang_timeout: Annotated[DurationOrAuto, Flag(metavar="TIME")] = DurationOrAuto()
    """Restart all ranks after this time without progress: 90s, 5m. auto: chosen from the measured time of a step;
    no limit for a script without report() (docs/explanation/recovery.md)."""
    signal_before: Annotated[Duration | None, Flag(metavar="TIME")] = None
    """Save and stop this long before the time limit: 2m. Default: a tenth of it, 30 s to 5 minutes."""
    continue_with: Literal["auto", "requeue", "job"] = "auto"
    """How the run continues after a preemption or its time limit: requeue the same job, or submit a new job.
    auto: submit a new job if Slurm holds requeued jobs for more than 15 s (its default is 120 s)."""
    health_check: Annotated[str | None, Flag(metavar="COMMAND")] = None
    """Run this shell command on each node before its first ranks start. The run avoids a node on which it fails."""
    start_once: bool = False
    """Never start the ranks again, whatever has ended them: for a script that must not start twice."""
    grace_period: Annotated[Duration | None, Flag(metavar="TIME")] = None
    """Kill ranks that have not ended this long after the signal to stop: 90s. Default: as long as Slurm allows."""
    stop_signal: Annotated[str, Flag(metavar="NAME")] = "auto"
    """Signal on which your own script saves and exits: USR1, INT, HUP, TERM, USR2.
    auto: USR2 at the time limit and TERM at a preemption; if your script handles only one of them, always that one."""

    def __post_init__(self) -> None:
        """Check what can be checked without a cluster."""
        if self.spares < 0:
            raise UserError(f"--spares is {self.spares}: use 0 or more")
        if self.start_once and (self.elastic or self.spares):
            flag = "--elastic" if self.elastic else f"--spares {self.spares}"
            raise UserError(f"--start-once and {flag} are both given, but {flag} restarts the ranks: leave one out")
        if self.hang_timeout.typed and self.hang_timeout.typed.seconds < 1:
            raise UserError(f"--hang-timeout is {self.hang_timeout}: use 1s or more, or auto")
        lead, grace = self.signal_before, self.grace_period
        if lead and not _MIN_LEAD_SECONDS <= lead.seconds <= _MAX_LEAD_SECONDS:
            raise UserError(f"--signal-before is {lead}: use {_MIN_LEAD_SECONDS}s to 18h")
        if grace and not 0 < grace.seconds <= _MAX_LEAD_SECONDS - REQUEUE_SECONDS:
            raise UserError(f"--grace-period is {grace}: use 1s to 18h")
        if lead and grace and lead.seconds < (needed := grace.seconds + int(REQUEUE_SECONDS)):
            raise UserError(
                f"--grace-period is {grace}, and the requeue takes {REQUEUE_SECONDS:.0f} s more, but "
                f"--signal-before is {lead}: use --signal-before {needed}s or more, or leave it out"
            )
        if self.stop_signal != "auto" and self.stop_signal.removeprefix("SIG") not in _STOP_SIGNALS:
            names = ", ".join(_STOP_SIGNALS)
            raise UserError(f"--stop-signal is {self.stop_signal!r}: use one of {names}, or auto")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network between the nodes."""

    interface: Annotated[str | None, Flag(metavar="NAME")] = None
    """Network interface of the nodes, such as ib0, for the agents, the data and the ranks.
    Default: the interface of the route to the first node; NCCL chooses its interface itself."""
    port_range: Annotated[PortRange | None, Flag(metavar="FIRST-LAST")] = None
    """Ports that are open between the nodes: 20000-20100. Default: any ports.
    The ranks' own connections (NCCL, gloo) always use ports that the kernel chooses (docs/how-to/clusters.md)."""

    def __post_init__(self) -> None:
        """Check what can be checked without a node."""
        if self.interface is not None and not re.fullmatch(r"[^\s/:]{1,15}", self.interface):
            raise UserError(f"--interface is {self.interface!r}: use the name of one interface, as `ip link` shows it")

    @property
    def ports(self) -> range:
        """The ports of `port_range`; an empty range lets the kernel choose."""
        return self.port_range.ports if self.port_range else range(0)


@dataclass(frozen=True, kw_only=True)
class Notification:
    """Messages about the run."""

    notify: Annotated[tuple[str, ...], Flag(metavar="NAME", is_repeatable=True)] = ()
    """Send a message to this name in ~/.config/torchrelay-notify.yaml when the run completes or fails.
    all: to every name in the file. Repeatable (docs/how-to/notifications.md)."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run, with all flags resolved."""

    name: str
    cluster: Cluster
    resources: Resources
    data: str | None
    """The directory or archive that every node stages; None if the run has no data to stage."""
    program: Program
    """The program that the node agents run as each rank."""
    forked_from: str | None = None
    """The checkpoint of another run with which the program began; None if the run is not a fork."""
    working_directory: str = "."
    """The directory, relative to the top of the user's code, where a script was submitted and the ranks start."""
    stage_dir: str
    """The directory on each node's own disk for staged copies. Each node replaces the variables in it."""
    stage_keep: Duration = Duration(7 * 86400)
    """The time for which an unused copy in `stage_dir` is kept."""
    stage_timeout: Duration = Duration(300)
    """A node is dropped if its copy makes no progress for this time."""
    stage_env: str | None = None
    """The archive of the environment that every node unpacks; None if the ranks use the shared environment."""
    python: str | None = None
    """The interpreter of torchrun and a user's script, inside `container` if that is set; None if it is hpc's own."""
    container: str | None = None
    """The image in which torchrun and the ranks of a user's script run; None if they run without a container."""
    device: DeviceChoice = "auto"
    """The device of the ranks. With `cuda`, a node on which torch cannot use the GPUs counts as a bad node."""
    in_place: str | None = None
    """The top of the user's code if the script runs in place, without a copy; None if it runs from `code/`."""
    recovery: Recovery = field(default_factory=Recovery)
    network: Network = field(default_factory=Network)
    notification: Notification = field(default_factory=Notification)
    """The flags about messages. `all` is already replaced by the names that were in the file at the submission."""
    after: tuple[str, ...] = ()
    """The directories of the runs that must have ended before this run starts."""
    after_ok: tuple[str, ...] = ()
    """The directories of the runs that must be complete before this run starts."""
    tracker: tuple[Service, ...] = ()
    """The trackers to which the metrics are sent."""
    id: str = ""
    """A text that distinguishes the run from others of the same name."""
    mlflow_run: str | None = None
    """The id that MLflow gave the run at its submission; None if the run does not use MLflow."""

    @property
    def script(self) -> tuple[str, ...]:
        """The user's script, relative to the working directory, and its arguments; empty for the classifier."""
        return () if self.program.built_in else self.program.argv

    @property
    def job_nodes(self) -> NodeRange:
        """The nodes of the run's job, spares included."""
        return self.resources.nodes.with_spares(self.recovery.spares)

    @property
    def fewest_to_continue(self) -> int:
        """The fewest nodes on which the run continues once it has started."""
        return self.resources.nodes.fewest_to_continue(elastic=self.recovery.elastic)

    def code_directory(self, run: RunDir) -> Path:
        """Return the top of the user's code: the copy, unless the script runs in place."""
        return Path(self.in_place or run.code)

    def start_directory(self, run: RunDir) -> Path:
        """Return the working directory of the ranks."""
        return self.code_directory(run) / self.working_directory

    @property
    def stop_lead_seconds(self) -> int:
        """Seconds before the time limit at which the ranks get the signal to save and exit."""
        recovery = self.recovery
        if recovery.signal_before:
            return recovery.signal_before.seconds
        least = self.resources.time_min and self.resources.time_min.typed
        usual = stop_lead_seconds((least or self.resources.time_limit).minutes)
        return max(usual, recovery.grace_period.seconds + int(REQUEUE_SECONDS)) if recovery.grace_period else usual

    @property
    def shortest_minutes(self) -> int | None:
        """The minutes to which Slurm may shorten the time limit so that an attempt starts sooner; None if it may not.

        `auto` is the time in which an attempt can start, and save three times.
        """
        if self.resources.time_min is None:
            return None
        if typed := self.resources.time_min.typed:
            return typed.minutes
        return min(self.resources.time_limit.minutes, max(_SHORTEST_MINUTES, 3 * self.stop_lead_seconds // 60))

    @property
    def stop_signal(self) -> str | None:
        """The signal that asks a user's script to stop, such as SIGUSR1; None for `auto`, which each node resolves."""
        name = self.recovery.stop_signal
        return None if name == "auto" else f"SIG{name.removeprefix('SIG')}"

    def save(self, run: RunDir, resumption: int = 0) -> None:
        """Write `spec.json` or, if `resumption` is not 0, the spec that this resumption puts into force."""
        write_json(run.revised_spec(resumption) if resumption else run.spec, asdict(self, dict_factory=_json_fields))

    @classmethod
    def load(cls, run: RunDir) -> "RunSpec":
        """Read the spec in force. Raises UserError if the file is missing, unreadable or damaged."""
        path = current_spec(run)
        try:
            return read_spec(path, cls._from_json)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}): {run.path} is damaged or not a run directory") from error

    @classmethod
    def _from_json(cls, fields: dict[str, Any]) -> "RunSpec":
        spec = msgspec.convert(fields, cls, str_keys=True, dec_hook=lambda kind, text: kind.parse(text))
        if unknown := _unknown_fields(spec, fields):
            raise TypeError(f"unknown fields {', '.join(sorted(unknown))}")
        return spec


def _json_fields(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Word) else value for name, value in fields}


def _unknown_fields(value: Any, fields: Any) -> set[str]:
    """Return the names of JSON fields, also of nested objects, that a dataclass lacks. msgspec would ignore them."""
    if not is_dataclass(value):
        return set()
    own = {field.name for field in dataclass_fields(value)}
    nested = (_unknown_fields(getattr(value, name), fields[name]) for name in own & fields.keys())
    return set(fields).difference(own).union(*nested)


def program_of(script: Sequence[str]) -> str:
    """Return the program of a user's command line, as typed: `train.py`, or `-m package.module`."""
    return " ".join(script[: 2 if script[0] == "-m" else 1])
