"""One node's staging, as an agent does it, without Slurm: for benchmarks/staging and the tests.

    python -m benchmarks.staging.node --rank 1 --nodes 4 --port 17777 --run DIR --source DIR --stage-dir DIR

The nodes are 127.0.0.1, 127.0.0.2 and so on; node 0 listens on the port. Waits until all nodes are there, stages,
prints a JSON object, and serves the others until all have what they need.
"""

import atexit
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc.base import program
from hpc.base.units import Duration, NodeRange
from hpc.run.events.attempts import Attempt
from hpc.run.nodedir import HeldNodeDir
from hpc.run.rundir import RunDir
from hpc.run.spec import Resources, RunSpec
from hpc.run.spec_file import script_program
from jobs.control.channel import ControlChannel, ControlClient, ControlServer
from jobs.control.messages import NodeStatus, Phase
from jobs.node_attempt import NodeAllocation, NodeAttempt
from jobs.ranks.monitor import NodeMonitor
from jobs.staging.node_staging import NodeStaging
from jobs.staging.unpack_environment import stage_environment
from jobs.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class Options:
    """One node."""

    rank: int = 0
    nodes: int = 1
    port: int
    """Where node 0 listens."""
    run: Path
    """Directory for the events."""
    source: Path
    stage_dir: Path
    keep: Duration = RunSpec.stage_keep
    env: bool = False
    """The source is a packed environment, to be used like one."""


@dataclass(frozen=True)
class Node:
    """What an agent works with."""

    attempt: NodeAttempt
    channel: ControlChannel
    monitor: NodeMonitor

    def wait(self, condition: Callable[[], bool]) -> None:
        """Poll until a condition holds."""
        while not condition():
            if self.monitor.must_leave:
                sys.exit("stopped")
            self.monitor.poll()
            time.sleep(0.05)

    def all_have_joined(self) -> bool:
        """On the first node, whether all have reported; on the others, whether the first node has answered."""
        if isinstance(self.channel, ControlServer):
            return len(self.channel.statuses()) == self.attempt.allocation.num_nodes
        return self.channel.met.is_set()


def main(options: Options) -> None:
    """Stage on one node."""
    node = make_node(options)
    node.wait(node.all_have_joined)
    began = time.monotonic()
    with ExitStack() as resources:
        staging = NodeStaging(node.attempt, node.channel, node.monitor, resources)
        answer = (
            {"python": stage_environment(staging, options.source)} if options.env else _stage(staging, options.source)
        )
        # The clock is the machine's: what nodes on one machine print can be compared.
        print(json.dumps({**answer, "began": began, "ended": time.monotonic()}), flush=True)
        node.channel.report(phase=Phase.READY)
        # An agent trains now, and serves the others meanwhile.
        node.wait(lambda: bool(node.channel.directive.plans) and node.channel.directive.plans[-1].done)
        if isinstance(node.channel, ControlServer):
            server = node.channel
            node.wait(lambda: all(has_left(server, rank) for rank in range(1, options.nodes)))
        else:
            node.channel.report(phase=Phase.LEFT)
            node.channel.close()


def _stage(staging: NodeStaging, source: Path) -> dict[str, object]:
    staged = staging.stage(source)
    return {**asdict(staged), "path": str(staged.path)}


def make_node(options: Options) -> Node:
    """Start the parts of an agent."""
    hosts = tuple(f"127.0.0.{number + 1}" for number in range(options.nodes))
    run, held = RunDir(options.run), HeldNodeDir(options.run, options.rank)
    secret = str(options.port)
    atexit.register(held.close, remove=True)
    run.events.mkdir(parents=True, exist_ok=True)
    attempt = NodeAttempt(
        run=run,
        spec=RunSpec(
            name=run.name, cluster="slurm", resources=Resources(nodes=NodeRange(options.nodes)),
            data=str(options.source),
            program=script_program(("train.py",)), stage_dir=str(options.stage_dir), stage_keep=options.keep,
            stage_env=str(options.source) if options.env else None,
        ),
        allocation=NodeAllocation(
            cluster="slurm", job_id="1", restart=0, node_rank=options.rank, hostnames=hosts, cpus=None
        ),
        attempt=Attempt(
            attempt=1, job_id="1", restart=0, secret=secret, port=options.port, nodes=hosts, started=time.time()
        ),
    )  # fmt: skip
    stop = StopRequest()
    stop.install()
    channel: ControlChannel
    if options.rank == 0:
        channel = ControlServer(secret, len(hosts), [options.port])
    else:
        channel = ControlClient(hosts[:1], options.port, secret, NodeStatus(node_rank=options.rank))
    channel.report()
    return Node(attempt, channel, NodeMonitor(attempt, held, channel, stop))


def has_left(server: ControlServer, rank: int) -> bool:
    """Whether the first node need not wait for another one any more."""
    return server.is_silent(rank) or server.statuses()[rank].phase is Phase.LEFT


if __name__ == "__main__":
    main(program.parse(Options, sys.argv[1:], "python -m benchmarks.staging.node"))
