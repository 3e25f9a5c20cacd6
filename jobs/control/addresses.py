"""The network addresses at which this node's agent may be reached, and their interfaces. Runs on compute nodes.

Host names often do not work: a node's own name resolves to 127.0.1.1, and the names of others to a network that is
closed between compute nodes, or not at all. So the head node's agent publishes all its addresses in its claim. The
others try them, and the first connection shows which addresses work (jobs.control.channel).
"""

from collections.abc import Sequence
from ipaddress import ip_address

from hpc.base.kernel import interface_addresses


def own_addresses(interface: str | None = None) -> list[str]:
    """Return the addresses at which other nodes may reach this one: all, or those of one interface."""
    return [
        address
        for name, addresses in interface_addresses().items()
        for address in addresses
        if interface in {None, name} and not ip_address(address).is_loopback
    ]


def head_hosts(name: str, addresses: Sequence[str], interface: str | None = None) -> list[str]:
    """Return the hosts at which to try the head node: its name, which may mislead, only if no interface is given."""
    return [*([] if interface else [name]), *addresses]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if no interface has it."""
    return next((name for name, addresses in interface_addresses().items() if address in addresses), None)
