"""The types of the documents of `hpc VERB --json`. docs/site/json_schema.py makes the schema from them.

Many verbs print a type of the code. The documents that a verb builds as a dict have their types here. Classes and
fields are described by their docstrings.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired, TypedDict, get_type_hints

import msgspec

from hpc.base import program
from hpc.cluster.doctor.findings import Finding
from hpc.cluster.testbed.lifecycle import TestbedStatus
from hpc.commands.cluster.drill import Kind
from hpc.commands.runs.clean import Holding
from hpc.run.events.history import State
from hpc.run.events.interruptions import Interruption
from hpc.run.spec import Cluster, Service
from hpc.slurm.submission import StartEstimate
from hpc.status.stacks import StackGroup
from hpc.status.summary import Summary
from hpc.studies.scaling_study import Measures, Mode
from hpc.supervise.decide import Action
from training.profile import ADVICE, Costs


def described(kind: type[Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the types of some fields of a class, with their texts, for a document that has these fields alone."""
    types, texts = get_type_hints(kind), program.field_texts(kind)
    return {name: Annotated[types[name], msgspec.Meta(description=texts.get(name))] for name in names}


class Error(TypedDict):
    """Replaces the document of any verb that fails."""

    error: str
    """The line on stderr."""
    exit_code: Literal[1, 2]


class Submission(TypedDict):
    """The run. hpc fork and hpc evaluate print the same document."""

    run: str
    run_dir: str
    job_id: str | None
    cluster: Cluster
    script: NotRequired[str | None]
    status: NotRequired[Summary]
    """With --wait."""
    text: NotRequired[str]
    """With --dry-run: the script that would be sent, or, without Slurm, the command."""
    python: NotRequired[str | None]
    """With --dry-run."""
    container: NotRequired[str | None]
    """With --dry-run."""
    expected_start: NotRequired[StartEstimate | None]
    """With --dry-run."""
    changed: NotRequired[dict[str, Any]]
    """Of hpc fork: flags and their new values."""


class Resumption(TypedDict):
    """The run, and the flags that have changed."""

    run: str
    run_dir: str
    job_id: str | None
    cluster: Cluster
    changed: dict[str, Any]
    """Flags and their new values."""
    status: NotRequired[Summary]
    """With --wait."""


class CancelledRun(TypedDict):
    """A run that was cancelled, or had ended before."""

    run: str
    run_dir: str
    state: State


class UncancelledRun(TypedDict):
    """A run that may go on."""

    run: str
    run_dir: str
    error: str


class Cleaning(TypedDict):
    """The runs that were found or, with --yes, removed."""

    removed: bool
    bytes: int
    runs: list[Holding]
    problems: list[str]


class RankLine(TypedDict):
    """A line of a rank's log. With --follow, each document is on a line of its own."""

    attempt: int
    rank: int
    time: float | None
    """The time with which the line begins, in seconds since the epoch."""
    line: str


class AgentLine(TypedDict):
    """A line of the log of a node agent."""

    agent: str
    """Its job."""
    node: int
    time: float | None
    line: str


class SupervisedRun(TypedDict):
    """The action on a run. Without --once, each document is on a line of its own."""

    run: str
    run_dir: str
    action: Action
    reason: str
    job_id: str | None
    problem: str | None


class Report(TypedDict):
    """The files that were written."""

    report: str
    tables: list[str]


class Drill(TypedDict):
    """The run after the failure."""

    run: str
    drill: Kind
    state: State
    interruptions: list[Interruption]


class Default(TypedDict):
    """The default of a flag, and where it comes from."""

    flag: str
    value: str | list[str]
    source: str


class Config(TypedDict):
    """The defaults of hpc submit."""

    flags: list[Default]


class SentMetrics(TypedDict):
    """The metrics of a run that one tracker has."""

    run: str
    run_dir: str
    tracker: Service
    url: str | None
    points: int
    """Points that were sent now."""
    problem: str | None


ScalingSize = TypedDict(
    "ScalingSize",
    {"run": str, "nodes": int, "gpus_per_node": int, **described(Measures, get_type_hints(Measures))},
)


class Scaling(TypedDict):
    """A scaling study."""

    scaling: str
    directory: str
    mode: Mode
    minutes: float
    sizes: list[ScalingSize]


class Trial(TypedDict):
    """One trial of a sweep."""

    run: str
    state: Literal["waiting", "running", "completed", "pruned", "failed"]
    cause: str | None
    """Why the trial failed or was pruned."""
    value: float | None
    """The value of the metric."""
    params: dict[str, str]


class Sweep(TypedDict):
    """A sweep, with its best trial first."""

    sweep: str
    directory: str
    metric: str
    best: str | None
    """The run of the best trial."""
    trials: list[Trial]


ClassProbability = TypedDict("ClassProbability", {"class": str, "probability": float})


class Prediction(ClassProbability):
    """An image with its most likely class."""

    path: str
    top: list[ClassProbability]
    """As many classes as --top says, the most likely first."""


class UnreadableImage(TypedDict):
    """An image that cannot be read."""

    path: str
    error: str


class Profile(TypedDict):
    """The bottleneck of a training."""

    model: str
    batch_size: int
    """Images of a step, of all ranks."""
    world_size: int
    device: str
    workers: int
    """Loader processes per rank."""
    images_per_second: float
    milliseconds: Costs
    bottleneck: Literal[*ADVICE]
    description: str
    advice: str


class Recipient(TypedDict):
    """A recipient of messages."""

    name: str
    service: str
    sent: bool | None
    problem: str | None


class Shell(TypedDict):
    """The command of the shell, which is not started."""

    run: str
    job_id: str
    node: str
    command: list[str]


DOCUMENTS: dict[str, Any] = {
    "error": Error,
    "submit": Submission,
    "resume": Resumption,
    "status": list[Summary],
    "cancel": list[CancelledRun | UncancelledRun],
    "clean": Cleaning,
    "logs": list[RankLine | AgentLine | StackGroup],
    "supervise": list[SupervisedRun],
    "doctor": list[Finding],
    "report": Report,
    "drill": Drill,
    "config": Config,
    "sync": list[SentMetrics],
    "scaling": Scaling,
    "sweep": Sweep,
    "predict": list[Prediction | UnreadableImage],
    "profile": Profile,
    "testbed": TestbedStatus,
    "notify": list[Recipient],
    "shell": Shell,
}
