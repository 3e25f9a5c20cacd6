"""The command line: `hpc testbed up|down|status|kill-node|revive-node`. Runs on the testbed's machine."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, cast

import tyro
from rich.console import Console
from rich.table import Table

from hpc import cli
from hpc.cli import Common
from hpc.testbed import lifecycle
from hpc.testbed.layout import TestbedShape

NodeName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class Up(Common):
    """Start Slurm with pretended nodes on this machine, or repair what there is of it."""

    shape: Annotated[TestbedShape, tyro.conf.OmitArgPrefixes] = field(default_factory=TestbedShape)

    def apply(self) -> None:
        """Start or repair."""
        lifecycle.up(self.shape)


@dataclass(frozen=True, kw_only=True)
class Down(Common):
    """End the testbed and leave nothing of it behind."""

    def apply(self) -> None:
        """End it."""
        lifecycle.down()


@dataclass(frozen=True, kw_only=True)
class ShowStatus(Common):
    """Show the nodes, and the slurm.conf for SLURM_CONF."""

    def apply(self) -> None:
        """Change nothing: every verb ends with the status."""


@dataclass(frozen=True, kw_only=True)
class KillNode(Common):
    """Cut a node's power: silence at once, and Slurm notices in its own time."""

    name: NodeName
    """The node, for example gpu02."""

    def apply(self) -> None:
        """Kill it."""
        lifecycle.kill_node(self.name)


@dataclass(frozen=True, kw_only=True)
class ReviveNode(Common):
    """Boot a killed node again, with an empty /tmp and /dev/shm, and wait until Slurm uses it."""

    name: NodeName
    """The node, for example gpu02."""

    def apply(self) -> None:
        """Boot it."""
        lifecycle.revive_node(self.name)


Options = Up | Down | ShowStatus | KillNode | ReviveNode
Verb = (
    Annotated[Up, tyro.conf.subcommand("up")]
    | Annotated[Down, tyro.conf.subcommand("down")]
    | Annotated[ShowStatus, tyro.conf.subcommand("status")]
    | Annotated[KillNode, tyro.conf.subcommand("kill-node")]
    | Annotated[ReviveNode, tyro.conf.subcommand("revive-node")]
)


def main(argv: Sequence[str]) -> int:
    """Run one verb; the exit code is 0, 1 if the work failed, 2 if the user has to type something else."""
    # tyro reads a union as the set of subcommands; a union is no class, which is what `run` asks for.
    return cli.run(_run, cast("type[Any]", Verb), argv, "testbed")


def _run(options: Options) -> int:
    """Do the verb's work, then say how things stand."""
    options.apply()
    _show(lifecycle.status(), as_json=options.json)
    return 0


def _show(status: lifecycle.TestbedStatus, *, as_json: bool) -> None:
    """Print the status for a program or for people."""
    if as_json:
        cli.print_json(asdict(status))
        return
    console = Console()
    if not status.up:
        console.print("The testbed is not up.")
        return
    table = Table("node", "address", "state")
    for node in status.nodes:
        table.add_row(node.name, node.address, node.state)
    console.print(table)
    console.print(f"export SLURM_CONF={status.slurm_conf}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
