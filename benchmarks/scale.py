"""What a large job costs the head node's agent, and how soon it notices a lost node.

    .venv/bin/python -m benchmarks.scale

This process is the head's agent: the real control server and coordinator, polled as in a job. A second process has a
connection for each other node, and sends on it what its agent would: the state of eight ranks, twice a second. A third
one is the node that falls silent (it is stopped). The columns of the table:

- joined_seconds: until every node was in the first round;
- cores: CPU seconds of the head's agent per second, while all train;
- reports_per_second: how often it took the status of a node, which an agent would send twice a second;
- poll_ms: the median of the coordinator's look at all statuses;
- noticed_seconds: from the moment at which a node was stopped until its loss was recorded;
- read_ms: to read the events of all nodes, one file per node, two events each.
"""

import json
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Findings, Flags, Row, benchmark
from hpc.base.transport import Connection, Limits, connect
from hpc.run.events import kinds, ledger
from hpc.run.events.history import History
from hpc.run.events.ledger import EventWriter
from hpc.run.rundir import RunDir
from hpc.run.spec import Resources, RunSpec
from hpc.run.spec_file import script_program
from jobs.control.channel import ControlServer
from jobs.control.coordinator import Coordinator
from jobs.control.messages import NodeStatus, Phase, RankHeartbeat
from jobs.node_attempt import NodeAllocation, NodeAttempt
from jobs.stop_request import StopRequest

RANKS_PER_NODE = 8
_POLL_SECONDS, _WARM_UP_SECONDS, _MEASURED_SECONDS, _PATIENCE_SECONDS = 0.1, 5.0, 15.0, 300.0
# Each node's status comes as often as an agent's, spread over the time between.
_SEND_SECONDS, _SLOTS, _JOIN_AT_ONCE = 0.5, 10, 32


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    nodes: tuple[int, ...] = (16, 128, 512, 1024, 2048)
    """Sizes of the job."""


def heartbeats(node_rank: int, step: int) -> tuple[RankHeartbeat, ...]:
    """The ranks of a node that trains."""
    first = node_rank * RANKS_PER_NODE
    return tuple(
        RankHeartbeat(
            rank=rank, step=step, phase="step", state="R", still_seconds=0.1, step_seconds=0.25, busy_seconds=0.21
        )
        for rank in range(first, first + RANKS_PER_NODE)
    )


def pretend(port: int, secret: str, first: int, last: int) -> None:
    """Be the agents of some nodes, until killed: on real connections, but in one thread, which a thousand share."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    limits = Limits(timeout_seconds=_PATIENCE_SECONDS, max_message_bytes=2**20)
    nodes = list[tuple[Connection, dict[str, Any]]]()
    while True:
        for slot in range(_SLOTS):
            end = time.monotonic() + _SEND_SECONDS / _SLOTS
            for connection, status in nodes[slot::_SLOTS]:
                for heartbeat in status["heartbeats"]:
                    heartbeat["step"] += 2
                connection.send(status)
            for connection, status in nodes[slot::_SLOTS]:
                number = connection.receive().get("directive", status)["round"]
                if number != status["round"]:
                    ranks = list(map(asdict, heartbeats(status["node_rank"], 0)))
                    status.update(phase=Phase.RUNNING, round=number, heartbeats=ranks)
            for node_rank in range(first + len(nodes), min(last, first + len(nodes) + _JOIN_AT_ONCE)):
                status = asdict(NodeStatus(node_rank=node_rank, phase=Phase.READY, port=20_000))
                nodes.append((connect(("127.0.0.1", port), secret, "control", limits), status))
            time.sleep(max(0.0, end - time.monotonic()))


@contextmanager
def others(port: int, secret: str, nodes: int) -> Iterator[subprocess.Popen[bytes]]:
    """All nodes but the head; yields the process of the last one."""
    command = [sys.executable, "-m", "benchmarks.scale", "pretend", str(port), secret]
    with (
        subprocess.Popen([*command, "1", str(nodes - 1)]) as most,
        subprocess.Popen([*command, str(nodes - 1), str(nodes)]) as last,
    ):
        try:
            yield last
        finally:
            most.kill()
            last.kill()


class Head:
    """The head node's agent, without ranks of its own."""

    def __init__(self, nodes: int, directory: Path) -> None:
        self.secret, self.nodes, self._step = secrets.token_hex(16), nodes, 0
        run = RunDir(directory)
        names = tuple(f"node{number:04d}" for number in range(nodes))
        spec = RunSpec(
            name="scale", cluster="local", data=None, program=script_program(("train.py",)), stage_dir=str(directory),
            resources=Resources(nodes=str(nodes), gpus_per_node=str(RANKS_PER_NODE)),
        )  # fmt: skip
        self.server = ControlServer(self.secret, nodes)
        for node_rank in range(nodes):
            writer = EventWriter(run.events / f"{ledger.attempt_prefix(1)}node-{node_rank:04d}.jsonl", 1)
            writer.path.parent.mkdir(exist_ok=True)
            if node_rank == 0:
                head = writer
                claimed = kinds.Claimed(
                    attempt=1, job_id="1", restart=0, secret=self.secret, port=self.server.port, nodes=names
                )
                writer.append(claimed)
                writer.append(kinds.Checked(nodes=names))
            writer.append(kinds.Joined(node=names[node_rank], node_rank=node_rank, clock_skew_seconds=0.0))
            writer.append(kinds.DataStaged(node=names[node_rank], source="shared", seconds=1.0))
        self.run = run
        [attempt] = History.load(run).attempts
        allocation = NodeAllocation(
            cluster="local", job_id="1", restart=0, node_rank=0, hostnames=names, cpus=RANKS_PER_NODE
        )
        node = NodeAttempt(run=run, spec=spec, allocation=allocation, attempt=attempt, writer=head)
        self._coordinator = Coordinator(node, self.server, StopRequest())
        self.server.report(phase=Phase.READY, port=20_000)

    def poll(self) -> float:
        """Do what an agent does ten times a second. Returns the seconds that the coordinator took."""
        self._step += 1
        number = self.server.directive.round
        phase = Phase.RUNNING if number else Phase.READY
        self.server.report(phase=phase, round=number, heartbeats=heartbeats(0, self._step) if number else ())
        began = time.perf_counter()
        self._coordinator.poll()
        took = time.perf_counter() - began
        time.sleep(_POLL_SECONDS)
        return took

    def has_all(self) -> bool:
        """Whether all nodes are in the first round."""
        statuses = self.server.statuses().values()
        return len(statuses) == self.nodes and all(status.phase is Phase.RUNNING for status in statuses)

    def last_step(self) -> int:
        """That of the last node but one, which grows by two with every report."""
        return self.server.statuses()[self.nodes - 2].heartbeats[0].step

    def has_lost_one(self) -> bool:
        """Whether the loss of a node is recorded."""
        events = ledger.read(self.run.events, f"{ledger.attempt_prefix(1)}node-0000")
        return bool(History(events).of(kinds.NodeLost))

    def poll_until(self, condition: Callable[[], bool]) -> float:
        """Poll until a condition holds; returns how long that took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > _PATIENCE_SECONDS:
                raise TimeoutError(f"{condition.__name__} of {self.nodes} nodes: not in {_PATIENCE_SECONDS:.0f} s")
            self.poll()
        return time.monotonic() - began


def measure_one(nodes: int) -> Row:
    """Measure one size of job."""
    with tempfile.TemporaryDirectory() as directory:
        head = Head(nodes, Path(directory))
        with others(head.server.port, head.secret, nodes) as last:
            joined = head.poll_until(head.has_all)
            end = time.monotonic() + _WARM_UP_SECONDS
            while time.monotonic() < end:
                head.poll()
            cpu, began, polls, step = time.process_time(), time.monotonic(), list[float](), head.last_step()
            while time.monotonic() < began + _MEASURED_SECONDS:
                polls.append(head.poll())
            seconds = time.monotonic() - began
            cores, reports = (time.process_time() - cpu) / seconds, (head.last_step() - step) / 2 / seconds
            last.send_signal(signal.SIGSTOP)
            noticed = head.poll_until(head.has_lost_one)
            began = time.perf_counter()
            ledger.read(head.run.events)
            read = time.perf_counter() - began
        head.server.close()
    return {
        "nodes": nodes, "joined_seconds": round(joined, 1), "cores": round(cores, 3),
        "reports_per_second": round(reports, 1), "poll_ms": round(median(polls) * 1000, 2),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "noticed_seconds": round(noticed, 1), "read_ms": round(read * 1000, 1),
    }  # fmt: skip


def measure(options: Options) -> Findings:
    """Measure each size in a process of its own, whose memory is that of an agent."""
    commands = ([sys.executable, "-m", "benchmarks.scale", "one", str(nodes)] for nodes in options.nodes)
    printed = [subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout for command in commands]
    return Findings(tables={"rows": [json.loads(each.splitlines()[-1]) for each in printed]})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pretend", port, secret, first, last]:
            pretend(int(port), secret, int(first), int(last))
        case ["one", nodes]:
            print(json.dumps(measure_one(int(nodes))))
        case _:
            benchmark("scale", Options(), measure, small={"nodes": (16,)})
