"""One node's part in one attempt: its place in the job, the attempt, and the file of its events.

Runs on compute nodes.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import submitit

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import TEMPORARY, json_line, write_atomic
from hpc.base.text import visible
from hpc.run.events import ledger
from hpc.run.events.attempts import Attempt
from hpc.run.events.history import History
from hpc.run.events.kinds import AttemptEnded, Claimed, Event
from hpc.run.events.ledger import EventWriter
from hpc.run.nodedir import stage_dir_on_node
from hpc.run.ownership import check_is_own
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import bad_nodes
from hpc.slurm.client import SlurmRefusalError

_RETRY_SECONDS, _ALIVE_SECONDS = 3.0, 5.0
STORAGE_SECONDS = 3600.0
"""Seconds for which agents wait, with idle nodes, for storage that is full or does not answer."""
HANGS_SECONDS = 3.0
"""Storage that has not answered for this long hangs, as an NFS mount does whose server is away."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class NodeAllocation:
    """The nodes of a job, seen from one of them."""

    cluster: str
    """`slurm`, or `local` with submitit's local executor."""
    job_id: str
    restart: int
    """Number of times that Slurm has restarted the job."""
    node_rank: int
    hostnames: tuple[str, ...]
    """Host names by node rank."""
    cpus: int | None
    """Number of CPUs that the job asked for on each node (SLURM_CPUS_PER_TASK); None if unknown."""

    @property
    def job_start(self) -> tuple[str, int]:
        """Identity of this start of the job: job id and number of restarts."""
        return self.job_id, self.restart

    @property
    def is_first(self) -> bool:
        """Whether this is the first node, whose agent claims the attempt, coordinates it, and asks for the requeue."""
        return self.node_rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes in the allocation."""
        return len(self.hostnames)

    @property
    def has_own_cores(self) -> bool:
        """Whether Slurm confines the job to its own cores on this node, so that no other job computes on them."""
        return self.cluster != "local" and len(os.sched_getaffinity(0)) == self.cpus

    @property
    def first_node(self) -> str:
        """Host name of the first node, on which srun's task 0 runs."""
        return self.hostnames[0]

    @property
    def host(self) -> str:
        """This node's host name."""
        return self.hostnames[self.node_rank]

    def names(self, node_ranks: Iterable[int]) -> list[str]:
        """Return the host names of some nodes, sorted by node rank."""
        return [self.hostnames[node_rank] for node_rank in sorted(node_ranks)]


def find_allocation(environment: Mapping[str, str]) -> NodeAllocation:
    """Read the allocation from the environment.

    Raises:
        RuntimeError: the process was started neither by srun nor by submitit's local executor.
    """
    job = submitit.JobEnvironment()
    local = environment.get("SUBMITIT_EXECUTOR") == "local"
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    return NodeAllocation(
        cluster="local" if local else "slurm",
        job_id=job.job_id,
        restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
        node_rank=job.global_rank,
        hostnames=("localhost",) * job.num_tasks if local else tuple(job.hostnames),
        cpus=int(cpus) if cpus else None,
    )


class SharedStorage:
    """Reads and writes shared storage in a thread, in order. So an agent goes on while the storage hangs."""

    def __init__(self) -> None:
        self._lock, self._began = threading.Lock(), 0.0
        self._requests = deque[tuple[Callable[[], Any], Future[Any]]]()

    def ask(self, act: Callable[[], _Answer], *, otherwise: _Answer) -> _Answer:
        """Return what `act` returns; `otherwise` if the storage hangs, and `act` is then called when it answers again.

        Raises:
            OSError: `act` raised it.
        """
        request = self.request(act)
        # Only the callers of the first seconds wait.
        answered, _ = wait([request], max(0.0, self._began + HANGS_SECONDS - time.monotonic()))
        return request.result() if answered else otherwise

    def finish(self) -> None:
        """Wait until the storage has answered every request."""
        self.request(lambda: None).result()

    def request(self, act: Callable[[], _Answer]) -> "Future[_Answer]":
        """Have `act` called after all that was requested before, and return its answer, which comes later."""
        answer = Future[_Answer]()
        with self._lock:
            self._requests.append((act, answer))
            if len(self._requests) == 1:
                self._began = time.monotonic()
                threading.Thread(target=self._work, daemon=True, name="storage").start()
        return answer

    def _work(self) -> None:
        while True:
            act, answer = self._requests[0]
            self._began = time.monotonic()
            try:
                answer.set_result(act())
            except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
                answer.set_exception(error)
            with self._lock:
                self._requests.popleft()
                if not self._requests:
                    return


@dataclass(frozen=True, kw_only=True)
class NodeAttempt:
    """One node's part in one attempt."""

    run: RunDir
    spec: RunSpec
    allocation: NodeAllocation
    attempt: Attempt
    storage: SharedStorage = field(default_factory=SharedStorage)
    has_unsaved_snapshot: threading.Event = field(default_factory=threading.Event)
    """Set if the newest snapshot could not be saved, and so exists only in this node's memory."""
    unrecorded_ends: list[AttemptEnded] = field(default_factory=list)
    """The end of the attempt if it could not be recorded, for example because the disk was full."""

    @property
    def host(self) -> str:
        """This node's host name."""
        return self.allocation.host

    @property
    def writer(self) -> EventWriter:
        """The writer of this node's events."""
        number = self.attempt.attempt
        return EventWriter(ledger.agent_file(self.run, number, self.allocation.node_rank), number)

    @cached_property
    def stage_dir(self) -> Path:
        """Directory for staged copies on this node. Raises TorchrelayError if the node does not have it."""
        return stage_dir_on_node(self.spec.stage_dir, os.environ)

    @property
    def on_slurm(self) -> bool:
        """Whether Slurm runs the job, not submitit's local executor."""
        return self.allocation.cluster == "slurm"

    def record(self, event: Event) -> None:
        """Append an event of this attempt, later if the storage hangs.

        A full disk does not interrupt the run: the error is logged.
        """
        self.storage.ask(partial(self._record, ledger.dated(event)), otherwise=None)

    def record_later(self, event: Event) -> None:
        """Have an event appended as `record` does, and do not wait for that."""
        self.storage.request(partial(self._record, ledger.dated(event)))

    def _record(self, event: Event) -> None:
        try:
            self.writer.append(event)
        except OSError as error:
            log(f"{event.kind} could not be recorded: {error}")
        self.share(event)

    def share(self, event: Event) -> None:
        """Let the user's other runs know if the event says that a node has failed, or works again."""
        try:
            if self.on_slurm:
                bad_nodes.learn(self.run, event)
        except OSError as error:
            log(f"other runs do not learn from {event.kind}: {error}")

    def show_steps(self, record: Mapping[str, Any]) -> None:
        """Write the steps that a script has counted, for `hpc status`. A full disk leaves the last record."""
        with contextlib.suppress(OSError):
            self.run.counted_steps.parent.mkdir(exist_ok=True)
            write_atomic(self.run.counted_steps, json_line({"attempt": self.attempt.attempt, **record}))

    @property
    def reports_steps(self) -> bool:
        """Whether failures have a known step: the program promises to report steps, or has done so in this attempt."""
        return self.spec.program.reports_steps or self.history().during(self.attempt.attempt).knows_steps

    def history(self) -> History:
        """Read the history of the run, with all attempts and nodes."""
        return History.load(self.run)

    def lacks_run(self, device: int) -> bool:
        """Return whether the storage works, and does not have this attempt's claim in the run directory.

        `device` is the file system of the run. If it is not mounted, its mount point is an empty directory of another
        one, or missing.
        """
        try:
            with ledger.claim_file(self.run, self.attempt.attempt).open("rb") as file:
                claim = ledger.decoded(file.readline())
            return isinstance(claim, Claimed) and claim.secret != self.attempt.secret
        except (FileNotFoundError, NotADirectoryError):
            nearest = next(parent for parent in self.run.path.parents if parent.exists())
            return nearest.stat().st_dev == device

    def reported_lost(self) -> list[str]:
        """Return the names of the lost nodes, once for each agent of this attempt that has reported the loss."""
        # All surviving agents poll this, so it reads only the files of this attempt's agents.
        prefix = f"{ledger.attempt_prefix(self.attempt.attempt)}node-"
        return History(ledger.read(self.run.events, prefix)).lost_nodes


def log(text: str) -> None:
    """Print a line to the job's log. A full disk does not interrupt the run."""
    with contextlib.suppress(OSError):
        print(f"torchrelay: {visible(text)}", flush=True)


def send_heartbeats(run: RunDir) -> None:
    """Start a thread that touches the run's heartbeat file, which tells the supervisor that the run is alive."""

    def touch() -> None:
        while True:
            # Storage that is full or not reachable must not end this thread.
            with contextlib.suppress(OSError):
                run.alive.touch()
            time.sleep(_ALIVE_SECONDS)

    threading.Thread(target=touch, daemon=True, name="alive").start()


def load_own_spec(run: RunDir) -> RunSpec:
    """Check that the run is this user's, and load its spec. Raises OSError, not UserError, if the storage fails."""
    check_is_own(run)
    try:
        return RunSpec.load(run)
    except UserError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in TEMPORARY:
            raise error.__cause__ from error
        raise


def await_storage(run: RunDir, stopped: Callable[[], bool], act: Callable[[], _Answer]) -> _Answer:
    """Retry an action in the run directory while its storage is full or does not answer, for up to an hour.

    Touches the run's heartbeat meanwhile, for the supervisor.

    Raises:
        OSError: the storage had another error, or an hour is over, or `stopped` returned True.
    """
    deadline = time.monotonic() + STORAGE_SECONDS
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in TEMPORARY or stopped() or time.monotonic() > deadline:
                raise
            log(f"the storage of the run does not work yet, trying again: {run.path}: {error}")
        with contextlib.suppress(OSError):
            run.alive.touch()
        time.sleep(_RETRY_SECONDS)


def ask_slurm(ask: Callable[[], _Answer], patience_seconds: float) -> _Answer:
    """Retry a request until Slurm answers it: Slurm's controller is away for minutes during a fail-over.

    `ask` may also write to the run directory, so it is also retried while that storage is full or does not answer.

    Raises:
        SlurmRefusalError: Slurm refused the request.
        TorchrelayError: Slurm did not answer within `patience_seconds`.
        OSError: the storage did not work within `patience_seconds`, or another error occurred.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return ask()
        except SlurmRefusalError:
            raise
        except (TorchrelayError, OSError) as error:
            may_pass = isinstance(error, TorchrelayError) or error.errno in TEMPORARY
            if not may_pass or time.monotonic() > deadline:
                raise
            log(f"the run cannot continue yet, trying again: {error}")
            time.sleep(_RETRY_SECONDS)
