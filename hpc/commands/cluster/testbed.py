"""The command line: `hpc testbed up|down|status|kill-node|revive-node`. Runs on the testbed's machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, cast

from rich.console import Console
from rich.table import Table

from hpc.base.flags import Flag
from hpc.cluster.testbed import lifecycle
from hpc.cluster.testbed.layout import TestbedShape
from hpc.cluster.testbed.system import require_root
from hpc.commands import cli
from hpc.commands.cli import Common
from hpc.slurm.client import TESTBED_DIRECTORY

NodeName = Annotated[str, Flag(metavar="NAME", is_positional=True)]


@dataclass(frozen=True, kw_only=True)
class Up(Common):
    """Start Slurm with simulated nodes on this machine, or repair it."""

    shape: TestbedShape = field(default_factory=TestbedShape)


@dataclass(frozen=True, kw_only=True)
class Down(Common):
    """Stop the testbed and remove all its files."""


@dataclass(frozen=True, kw_only=True)
class Status(Common):
    """Show the nodes and the value for SLURM_CONF."""


@dataclass(frozen=True, kw_only=True)
class KillNode(Common):
    """Simulate a power failure of a node: it stops at once, and Slurm marks it down after --slurmd-timeout."""

    name: NodeName
    """The node, for example gpu02."""


@dataclass(frozen=True, kw_only=True)
class ReviveNode(Common):
    """Boot a killed node, with an empty /tmp and /dev/shm, and wait until Slurm can use it."""

    name: NodeName
    """The node, for example gpu02."""


# tyro names the subcommands after the classes.
Verb = Up | Down | Status | KillNode | ReviveNode


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns the exit code."""
    # tyro reads a union as subcommands, but `cli.run` is typed for a class.
    return cli.run(_run, cast("type[Any]", Verb), "testbed", argv)


def _run(options: Verb) -> int:
    if not isinstance(options, Status):
        require_root()
    match options:
        case Up():
            lifecycle.up(options.shape)
        case Down():
            ended = lifecycle.down()
            if not options.json:
                print(f"{'ended the testbed of' if ended else 'there is no testbed in'} {TESTBED_DIRECTORY}")
                return 0
        case KillNode():
            lifecycle.kill_node(options.name)
        case ReviveNode():
            lifecycle.revive_node(options.name)
    status, console = lifecycle.status(), Console()
    if options.json:
        cli.print_json(asdict(status))
    elif not status.up:
        console.print("The testbed is not up.")
    else:
        table = Table("node", "address", "state")
        for node in status.nodes:
            table.add_row(node.name, node.address, node.state)
        console.print(table)
        console.print(f"export SLURM_CONF={status.slurm_conf}", soft_wrap=True, highlight=False)
    return 0
