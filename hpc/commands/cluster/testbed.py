"""The command line: `hpc testbed up|down|status|kill-node|revive-node`. Runs on the testbed's machine."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table

from hpc.base.errors import UserError
from hpc.base.flags import POSITIONAL, Flag
from hpc.cluster.testbed import lifecycle
from hpc.cluster.testbed.layout import TestbedShape
from hpc.cluster.testbed.system import require_root
from hpc.commands import cli
from hpc.slurm.client import TESTBED_DIRECTORY


@dataclass(frozen=True, kw_only=True)
class TestbedOptions(cli.Common):
    """Run a real Slurm with simulated nodes on this machine.

    For example:
      hpc testbed up --nodes 4
      hpc testbed kill-node gpu02
    """

    action: Annotated[Literal["up", "down", "status", "kill-node", "revive-node"], POSITIONAL]
    """What to do.
    - up: start Slurm with simulated nodes, or repair it
    - down: stop the testbed and remove all its files
    - status: show the nodes and the value for SLURM_CONF
    - kill-node: simulate a power failure of a node: it stops at once, and Slurm marks it down after --slurmd-timeout
    - revive-node: boot a killed node, with an empty /tmp and /dev/shm, and wait until Slurm can use it"""
    node: Annotated[str | None, Flag(metavar="[NODE]", is_positional=True)] = None
    """The node for kill-node and revive-node, for example gpu02."""
    shape: TestbedShape = field(default_factory=TestbedShape)


def _check(options: TestbedOptions) -> None:
    """Raise UserError if the command line has a node or flags that the action does not take, or lacks its node."""
    takes_node = options.action in {"kill-node", "revive-node"}
    if takes_node and not options.node:
        raise UserError(f"missing argument NODE: type hpc testbed {options.action} gpu02, for example")
    if options.node and not takes_node:
        raise UserError(f"unexpected argument: {options.node} (see hpc testbed --help)")
    if options.action != "up" and options.shape != TestbedShape():
        raise UserError(f"hpc testbed {options.action} has no flags but --json and --debug: the others are for up")


def _run(options: TestbedOptions) -> int:
    _check(options)
    if options.action != "status":
        require_root()
    match options.action, options.node:
        case "up", _:
            lifecycle.up(options.shape)
        case "down", _:
            ended = lifecycle.down()
            if not options.json:
                print(f"{'ended the testbed of' if ended else 'there is no testbed in'} {TESTBED_DIRECTORY}")
                return 0
        case "kill-node", str(name):
            lifecycle.kill_node(name)
        case "revive-node", str(name):
            lifecycle.revive_node(name)
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


main = partial(cli.run, _run, TestbedOptions, "testbed")
