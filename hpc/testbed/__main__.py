"""The command line: `python -m hpc.testbed up|down|status|kill-node|revive-node`. Runs on the testbed's machine."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from hpc.errors import TorchrelayError
from hpc.testbed import lifecycle
from hpc.testbed.layout import Shape


@dataclass(frozen=True, kw_only=True)
class _Verb:
    """What every verb takes, and does after its work: say how things stand."""

    json: bool = False
    """Print one JSON document and nothing else."""

    def run(self) -> None:
        """Do the verb's work."""


@dataclass(frozen=True, kw_only=True)
class Up(_Verb):
    """Start Slurm with pretended nodes on this machine, or repair what there is of it."""

    shape: Annotated[Shape, tyro.conf.OmitArgPrefixes] = field(default_factory=Shape)

    def run(self) -> None:
        """Start or repair."""
        lifecycle.up(self.shape)


@dataclass(frozen=True, kw_only=True)
class Down(_Verb):
    """End the testbed and leave nothing of it behind."""

    def run(self) -> None:
        """End it."""
        lifecycle.down()


@dataclass(frozen=True, kw_only=True)
class Status(_Verb):
    """Show the nodes, and the slurm.conf for SLURM_CONF."""


@dataclass(frozen=True, kw_only=True)
class KillNode(_Verb):
    """Cut a node's power: silence at once, and Slurm notices in its own time."""

    name: tyro.conf.Positional[str]
    """The node, for example gpu02."""

    def run(self) -> None:
        """Kill it."""
        lifecycle.kill_node(self.name)


@dataclass(frozen=True, kw_only=True)
class ReviveNode(_Verb):
    """Boot a killed node again, with an empty /tmp and /dev/shm, and wait until Slurm uses it."""

    name: tyro.conf.Positional[str]
    """The node, for example gpu02."""

    def run(self) -> None:
        """Boot it."""
        lifecycle.revive_node(self.name)


Verb = (
    Annotated[Up, tyro.conf.subcommand("up")]
    | Annotated[Down, tyro.conf.subcommand("down")]
    | Annotated[Status, tyro.conf.subcommand("status")]
    | Annotated[KillNode, tyro.conf.subcommand("kill-node")]
    | Annotated[ReviveNode, tyro.conf.subcommand("revive-node")]
)


def main(argv: Sequence[str]) -> int:
    """Run one verb; the exit code is 0, 1 if the work failed, 2 if the user has to type something else."""
    verb: _Verb = tyro.cli(
        Verb,  # type: ignore[arg-type]  # tyro takes a union as the set of subcommands
        prog="python -m hpc.testbed",
        description=__doc__,
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        verb.run()
        _show(lifecycle.status(), as_json=verb.json)
    except TorchrelayError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _show(status: lifecycle.Status, *, as_json: bool) -> None:
    """Print the status for a program or for people."""
    if as_json:
        print(json.dumps(asdict(status)))
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
