"""One node's staging, as an agent does it, without Slurm: for benchmarks/staging.py and the tests.

    python benchmarks/staging_node.py --rank 1 --nodes 4 --port 17777 --run DIR --source DIR --stage-dir DIR

The nodes are 127.0.0.1, 127.0.0.2 and so on; node 0 listens on the port. Waits until all nodes are there, stages,
prints a JSON object, and gives to the others until all have what they need.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from hpc.core.attempts import Attempt
from hpc.core.ledger import EventWriter
from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from hpc.spec import Resources, RunSpec
from jobs.context import AgentContext
from jobs.control.channel import LOST_SECONDS, ControlClient, ControlServer
from jobs.control.messages import NodeStatus, Phase
from jobs.ranks.local_ranks import LocalRanks
from jobs.ranks.rendezvous import NodeAllocation
from jobs.ranks.torchrun import StopRequest
from jobs.staging.data import stage
from jobs.staging.unpack_environment import stage_environment

NONCE = "not-a-secret"


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
    keep: str = "7d"
    env: bool = False
    """The source is a packed environment, to be used like one."""


def main(options: Options) -> None:
    """Stage on one node."""
    node = make_node(options)
    wait(node, lambda: len(all_reports(node)) == options.nodes)
    began, began_cpu = time.monotonic(), time.process_time()
    answer = _use_environment(node) if options.env else _stage(node, options.source)
    # The clock is the machine's: what nodes on one machine say can be compared.
    times = {"began": began, "ended": time.monotonic(), "cpu": time.process_time() - began_cpu}
    print(json.dumps({**answer, **times}), flush=True)
    node.tell(phase=Phase.READY)
    # An agent trains now, and gives to the others meanwhile.
    wait(node, lambda: bool(node.orders.plans) and node.orders.plans[-1].done)
    if isinstance(node.link, ControlClient):
        node.tell(phase=Phase.LEFT)
        node.link.close()
    else:
        wait(node, lambda: all(has_left(node, rank) for rank in range(1, options.nodes)))
    node.held.close()


def _stage(node: AgentContext, source: Path) -> dict[str, object]:
    staged = stage(node, source)
    return {**asdict(staged), "path": str(staged.path)}


def _use_environment(node: AgentContext) -> dict[str, object]:
    stage_environment(node)
    return {"python": node.python}


def make_node(options: Options) -> AgentContext:
    """What an agent works with."""
    hosts = tuple(f"127.0.0.{number + 1}" for number in range(options.nodes))
    place = NodeAllocation(cluster="slurm", job_id="1", restart=0, node_rank=options.rank, hostnames=hosts, cpus=None)
    run, memory = RunDir(options.run), NodeDir(options.run / f"memory-{options.rank}")
    run.events.mkdir(parents=True, exist_ok=True)
    memory.make()
    report = NodeStatus(node_rank=options.rank)
    node = AgentContext(
        run=run,
        spec=RunSpec(
            name=run.name, cluster="slurm", resources=Resources(nodes=str(options.nodes)), data=str(options.source),
            stage_dir=str(options.stage_dir), stage_keep=options.keep,
            stage_env=str(options.source) if options.env else None,
        ),
        place=place,
        stop=StopRequest(),
        attempt=Attempt(
            attempt=1, job_id="1", restart=0, nonce=NONCE, port=options.port, nodes=hosts, started=time.time()
        ),
        writer=EventWriter(run.events / f"node-{options.rank}.jsonl"),
        memory=memory,
        ranks=LocalRanks(memory, 0, place.host),
        link=ControlServer(NONCE, options.port) if options.rank == 0 else ControlClient(place.head, options.port,
        NONCE, report), report=report,
    )  # fmt: skip
    node.stop.install()
    node.tell()
    return node


def all_reports(node: AgentContext) -> dict[int, NodeStatus]:
    """What the head node knows; the others only see that it is there."""
    if isinstance(node.link, ControlServer):
        return node.link.reports()
    return dict.fromkeys(range(node.place.num_nodes), node.report) if node.link.has_met else {}


def has_left(node: AgentContext, rank: int) -> bool:
    """Whether the head node need not wait for another one any more."""
    assert isinstance(node.link, ControlServer)  # noqa: S101 - for the type checker
    silent = (node.link.silent_seconds(rank) or 0.0) > LOST_SECONDS
    return silent or node.link.reports()[rank].phase is Phase.LEFT


def wait(node: AgentContext, condition: Callable[[], bool]) -> None:
    """Turn until something is so."""
    while not condition():
        if node.stop or node.head_is_lost:
            sys.exit("stopped")
        node.turn()
        time.sleep(0.05)


if __name__ == "__main__":
    main(tyro.cli(Options))
