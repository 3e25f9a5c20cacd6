"""Defines RunSpec, the resolved flags of one run as its spec file keeps them, and the flags of the run's job."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from hpc.base.errors import UserError
from hpc.base.files import write_json
from hpc.base.flags import Flag
from hpc.base.units import duration_seconds, port_range, walltime_minutes
from hpc.run.device_choice import DeviceChoice
from hpc.run.events.resumption import current_spec
from hpc.run.rundir import RunDir
from hpc.run.spec_file import Program, read_spec
from hpc.run.stop_times import REQUEUE_SECONDS, stop_lead_seconds

Cluster = Literal["slurm", "local"]
Service = Literal["wandb", "mlflow"]
"""The trackers to which a run can send its metrics."""

# The options of sbatch that --sbatch may not set, with advice.
MANAGED_SBATCH = {
    "nodes": "use --nodes instead", "ntasks": "use --nodes and --gpus-per-node instead",
    "ntasks-per-node": "use --gpus-per-node instead", "gpus-per-node": "use --gpus-per-node instead",
    "gpus": "use --nodes and --gpus-per-node instead", "gpus-per-task": "use --gpus-per-node instead",
    "gpus-per-socket": "use --gpus-per-node instead", "cpus-per-gpu": "use --cpus-per-gpu instead",
    "cpus-per-task": "use --cpus-per-gpu instead", "mem": "use --mem instead", "time": "use --time instead",
    "time-min": "use --time-min instead",
    "partition": "use --partition instead", "account": "use --account instead", "qos": "use --qos instead",
    "constraint": "use --constraint instead", "exclude": "use --exclude instead", "job-name": "use --name instead",
    "output": "logs are in the run directory, use --runs-dir", "error": "logs are in the run directory, use --runs-dir",
    "open-mode": "logs are always appended to: leave it out", "requeue": "runs are always requeued: leave it out",
    "no-requeue": "runs are always requeued until hpc cancel: leave it out",
    "no-kill": "always set for several nodes: leave it out", "signal": "use --signal-before instead",
    "array": "job arrays are not supported: submit one run per setting",
    "hetjob": "heterogeneous jobs are not supported: submit one run, or one per kind of node",
    "chdir": "runs start in the current directory: change it before hpc submit",
    "export": "runs get the whole environment: set variables before hpc submit",
    "wait": "use --wait instead", "test-only": "use --dry-run instead",
    "wrap": "to run a script of your own, use -- script.py ARGS",
}  # fmt: skip
# Forms of GPUs and of memory that sbatch accepts and sinfo prints.
_GPUS = re.compile(r"((?P<type>[^\s:,=()]+):)?(?P<count>\d+)")
_MEMORY = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)
# Times that Slurm reads as much shorter than most people mean: pattern, Slurm's unit, and what to type instead.
_UNCLEAR_TIMES = (
    (r"\d+", "minutes", "{0}h or {0}m"),
    (r"\d+:\d+", "minutes and seconds", "{0}:00 for hours, or 00:{0}"),
)
_UNCLEAR_MEMORY = r"[1-9]\d*"  # 0 is clear: it asks for all the memory of a node
# Fewest ports in a --port-range. They suffice for one run on a node (control channel, staging of data and environment,
# rendezvous, the ranks' store), and leave some for other runs.
_MIN_PORTS = 10
_SHORTEST_MINUTES = 10
_DEFAULT_LIMIT_MINUTES = 24 * 60
# Limits of --signal-before: the requeue itself takes part of this time, and sbatch keeps the number in 16 bits.
_MIN_LEAD_SECONDS, _MAX_LEAD_SECONDS = 15, 65535
_STOP_SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of the Slurm job."""

    nodes: Annotated[str, Flag(metavar="N", letter="-N")] = "1"
    """Number of nodes. MIN:MAX: as many as are free in this range."""
    gpus_per_node: Annotated[str, Flag(metavar="N")] = "1"
    """GPUs per node, with one rank each, or TYPE:N such as a100:2. 0: one rank per node on its CPUs (gloo)."""
    cpus_per_gpu: Annotated[int | None, Flag(metavar="N")] = None
    """CPUs per rank. Default: a node's share per GPU."""
    mem: Annotated[str | None, Flag(metavar="SIZE")] = None
    """Memory per node: 64G. Default: the partition's."""
    time: Annotated[str | None, Flag(metavar="TIME", letter="-t")] = None
    """Time limit of one attempt: 12h, 90m, 1-12:00:00. Default: the partition's, or at most a day if it has none."""
    time_min: Annotated[str | None, Flag(metavar="TIME")] = None
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
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", self.nodes) or self.max_nodes < self.min_nodes:
            raise UserError(f"--nodes is {self.nodes!r}: use a number such as 2, or a range such as 2:4")
        gpus = _GPUS.fullmatch(self.gpus_per_node)
        if gpus is None or (gpus["type"] and not self.num_gpus):
            raise UserError(
                f"--gpus-per-node is {self.gpus_per_node!r}: use a number such as 2, or a type and a number such as "
                "a100:2; 0 for one rank per node on its CPUs"
            )
        if self.cpus_per_gpu is not None and self.cpus_per_gpu < 1:
            raise UserError(f"--cpus-per-gpu is {self.cpus_per_gpu}: use 1 or more")
        _check_units(self.time, self.mem)
        if self.given_time_min is not None:
            _check_time("--time-min", self.given_time_min)
        for option in self.sbatch:
            key, separator, given = option.partition("=")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or bool(separator) != bool(given) or "\n" in given:
                raise UserError(f"--sbatch {option!r}: use KEY=VALUE, such as mail-type=END, or KEY, such as exclusive")
            if key in MANAGED_SBATCH:
                raise UserError(f"--sbatch {key}: {MANAGED_SBATCH[key]}")
            # --gpus-per-node sets the same field of the job, so sbatch would silently ignore --gres.
            if key == "gres" and self.num_gpus and re.search(r"(^|,)(gres:)?gpu\b", given):
                raise UserError(f"--sbatch {option}: use --gpus-per-node instead, for example --gpus-per-node a100:2")

    @property
    def limit_minutes(self) -> int:
        """The time limit of an attempt in minutes. If `time` is None, the default for partitions that have none."""
        return _DEFAULT_LIMIT_MINUTES if self.time is None else walltime_minutes(self.time)

    @property
    def given_time_min(self) -> str | None:
        """The value of --time-min; None if the flag is not set, or is `auto`."""
        return None if self.time_min == "auto" else self.time_min

    @property
    def min_nodes(self) -> int:
        """The fewest nodes that the run starts with."""
        return int(self.nodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most nodes that the run can use."""
        return int(self.nodes.split(":")[-1])

    @property
    def num_gpus(self) -> int:
        """GPUs per node."""
        return int(self.gpus_per_node.rpartition(":")[2])

    @property
    def gpu_type(self) -> str | None:
        """The required type of the GPUs; None for any."""
        return self.gpus_per_node.rpartition(":")[0] or None

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node: one per GPU, or one if the run uses no GPUs."""
        return self.num_gpus or 1

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
    hang_timeout: Annotated[str, Flag(metavar="TIME")] = "auto"
    """Restart all ranks after this time without progress: 90s, 5m. auto: chosen from the measured time of a step;
    no limit for a script without report() (docs/explanation/recovery.md)."""
    signal_before: Annotated[str | None, Flag(metavar="TIME")] = None
    """Save and stop this long before the time limit: 2m. Default: a tenth of it, 30 s to 5 minutes."""
    continue_with: Literal["auto", "requeue", "job"] = "auto"
    """How the run continues after a preemption or its time limit: requeue the same job, or submit a new job.
    auto: submit a new job if Slurm holds requeued jobs for more than 15 s (its default is 120 s)."""
    health_check: Annotated[str | None, Flag(metavar="COMMAND")] = None
    """Run this shell command on each node before its first ranks start. The run avoids a node on which it fails."""
    start_once: bool = False
    """Never start the ranks again, whatever has ended them: for a script that must not start twice."""
    grace_period: Annotated[str | None, Flag(metavar="TIME")] = None
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
        if self.hang_timeout != "auto" and duration_seconds("--hang-timeout", self.hang_timeout) < 1:
            raise UserError(f"--hang-timeout is {self.hang_timeout}: use 1s or more, or auto")
        if self.signal_before is not None:
            seconds = duration_seconds("--signal-before", self.signal_before)
            if not _MIN_LEAD_SECONDS <= seconds <= _MAX_LEAD_SECONDS:
                raise UserError(f"--signal-before is {self.signal_before}: use {_MIN_LEAD_SECONDS}s to 18h")
        if self.grace_period is not None:
            self._check_grace(self.grace_period)
        if self.stop_signal != "auto" and self.stop_signal.removeprefix("SIG") not in _STOP_SIGNALS:
            known = ", ".join(_STOP_SIGNALS)
            raise UserError(f"--stop-signal is {self.stop_signal!r}: use one of {known}, or auto")

    def _check_grace(self, grace: str) -> None:
        needed = duration_seconds("--grace-period", grace) + int(REQUEUE_SECONDS)
        if not REQUEUE_SECONDS < needed <= _MAX_LEAD_SECONDS:
            raise UserError(f"--grace-period is {grace}: use 1s to 18h")
        lead = self.signal_before
        if lead is not None and duration_seconds("--signal-before", lead) < needed:
            raise UserError(
                f"--grace-period is {grace}, and the requeue takes {REQUEUE_SECONDS:.0f} s more, but "
                f"--signal-before is {lead}: use --signal-before {needed}s or more, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network between the nodes."""

    interface: Annotated[str | None, Flag(metavar="NAME")] = None
    """Network interface of the nodes, such as ib0, for the agents, the data and the ranks.
    Default: the interface of the route to the first node; NCCL chooses its interface itself."""
    port_range: Annotated[str | None, Flag(metavar="FIRST-LAST")] = None
    """Ports that are open between the nodes: 20000-20100. Default: any ports.
    The ranks' own connections (NCCL, gloo) always use ports that the kernel chooses (docs/how-to/clusters.md)."""

    def __post_init__(self) -> None:
        """Check what can be checked without a node."""
        if self.interface is not None and not re.fullmatch(r"[^\s/:]{1,15}", self.interface):
            raise UserError(f"--interface is {self.interface!r}: use the name of one interface, as `ip link` shows it")
        if self.port_range is not None:
            given = re.fullmatch(r"(\d{1,5})-(\d{1,5})", self.port_range)
            low, high = (int(given[1]), int(given[2])) if given else (0, 0)
            if not 1024 <= low <= high - _MIN_PORTS + 1 or high >= 2**16:
                raise UserError(
                    f"--port-range is {self.port_range!r}: use LOW-HIGH, {_MIN_PORTS} or more ports from 1024 to "
                    "65535, such as 20000-20100"
                )

    @property
    def ports(self) -> range:
        """The ports of `port_range`; an empty range lets the kernel choose."""
        return port_range(self.port_range or "")


@dataclass(frozen=True, kw_only=True)
class Notification:
    """Messages about the run."""

    notify: Annotated[tuple[str, ...], Flag(metavar="NAME", is_repeatable=True)] = ()
    """Send a message to this name in ~/.config/torchrelay-notify.yaml when the run completes or fails.
    all: to every name in the file. Repeatable (docs/how-to/notifications.md)."""
    notify_interruptions: Annotated[int, Flag(metavar="N")] = 3
    """Also send a message when the run is interrupted more than N times within an hour."""

    def __post_init__(self) -> None:
        """Check what can be checked without the file."""
        if self.notify_interruptions < 0:
            raise UserError(f"--notify-interruptions is {self.notify_interruptions}: use 0 or more")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run, with all flags resolved."""

    name: str
    cluster: Cluster
    resources: Resources
    has_default_time: bool = False
    """Whether the user gave no --time. The time limit is then the partition's, also after hpc resume --partition."""
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
    stage_keep: str = "7d"
    """The time for which an unused copy in `stage_dir` is kept, such as 7d."""
    stage_timeout: str = "5m"
    """A node is dropped if its copy makes no progress for this time, such as 5m."""
    pack: int | None = None
    """The side, in pixels, of the images that the nodes pack and then train from; None if they do not pack."""
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
    def min_nodes(self) -> int:
        """The fewest nodes on which a started run continues."""
        return 1 if self.recovery.elastic and ":" not in self.resources.nodes else self.resources.min_nodes

    @property
    def job_nodes(self) -> tuple[int, int]:
        """The fewest and the most nodes of the run's job, spares included."""
        return self.resources.min_nodes + self.recovery.spares, self.resources.max_nodes + self.recovery.spares

    def code_directory(self, run: RunDir) -> Path:
        """Return the top of the user's code: the copy, unless the script runs in place."""
        return Path(self.in_place or run.code)

    def start_directory(self, run: RunDir) -> Path:
        """Return the working directory of the ranks."""
        return self.code_directory(run) / self.working_directory

    @property
    def stop_lead_seconds(self) -> int:
        """Seconds before the time limit at which the ranks get the signal to save and exit."""
        if self.recovery.signal_before is not None:
            return duration_seconds("--signal-before", self.recovery.signal_before)
        given = self.resources.given_time_min
        usual = stop_lead_seconds(walltime_minutes(given) if given else self.resources.limit_minutes)
        return usual if self.grace_seconds is None else max(usual, self.grace_seconds + int(REQUEUE_SECONDS))

    @property
    def shortest_minutes(self) -> int:
        """Minutes of the shortest useful time limit, in which an attempt can start, and save three times."""
        if given := self.resources.given_time_min:
            return walltime_minutes(given)
        return min(self.resources.limit_minutes, max(_SHORTEST_MINUTES, 3 * self.stop_lead_seconds // 60))

    @property
    def grace_seconds(self) -> int | None:
        """Seconds from the signal to stop until ranks that have not ended are killed; None if Slurm decides."""
        return (
            None
            if self.recovery.grace_period is None
            else duration_seconds("--grace-period", self.recovery.grace_period)
        )

    @property
    def stop_signal(self) -> str | None:
        """The signal that asks a user's script to stop, such as SIGUSR1; None for `auto`, which each node resolves."""
        name = self.recovery.stop_signal
        return None if name == "auto" else f"SIG{name.removeprefix('SIG')}"

    @property
    def stage_timeout_seconds(self) -> int:
        """The seconds of `stage_timeout`."""
        return duration_seconds("--stage-timeout", self.stage_timeout)

    def save(self, run: RunDir, resumption: int = 0) -> None:
        """Write `spec.json` or, if `resumption` is not 0, the spec that this resumption puts into force."""
        write_json(run.revised_spec(resumption) if resumption else run.spec, asdict(self))

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
        fields = dict(fields)
        for name in ("sbatch", "setup"):
            fields["resources"][name] = tuple(fields["resources"].get(name, ()))
        fields["resources"] = Resources(**fields["resources"])
        fields["recovery"] = Recovery(**fields.get("recovery", {}))
        fields["network"] = Network(**fields.get("network", {}))
        told = fields.get("notification", {})
        fields["notification"] = Notification(**{**told, "notify": tuple(told.get("notify", ()))})
        fields["program"] = Program.from_json(fields["program"])
        for name in ("tracker", "after", "after_ok"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)


def _check_units(time: str | None, mem: str | None) -> None:
    """Refuse a --time or --mem that is malformed, or that Slurm reads in another unit than most people mean."""
    if time is not None:
        _check_time("--time", time)
    if mem is not None and not _MEMORY.fullmatch(mem):
        raise UserError(f"--mem is {mem!r}: use a whole number with a unit, such as 64G")
    if mem is not None and re.fullmatch(_UNCLEAR_MEMORY, mem):
        raise UserError(f"--mem is {mem}, which Slurm takes for megabytes: use {mem}G or {mem}M")


def _check_time(flag: str, time: str) -> None:
    walltime_minutes(time, flag)
    for pattern, unit, advice in _UNCLEAR_TIMES:
        if re.fullmatch(pattern, time):
            raise UserError(f"{flag} is {time}, which Slurm takes for {unit}: use {advice.format(time)}")


def program_of(script: Sequence[str]) -> str:
    """Return the program of a user's command line, as typed: `train.py`, or `-m package.module`."""
    return " ".join(script[: 2 if script[0] == "-m" else 1])
