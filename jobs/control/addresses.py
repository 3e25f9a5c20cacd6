"""This node's network addresses: those at which its agent may be reached, and their interfaces. Runs on compute nodes.

Host names often do not serve: a node's own resolves to 127.0.1.1, and those of others to a network that is closed
between compute nodes, or not at all. So the head node's agent publishes all its addresses in its claim; the others try
them, and the connection that comes about shows which addresses work (jobs.control.channel).
"""

from collections.abc import Sequence
from ipaddress import ip_address

from hpc.base.kernel import interface_addresses


def own_addresses(interface: str | None = None) -> list[str]:
    """The addresses at which other nodes may reach this one: all, or those of one interface."""
    return [
        address
        for name, addresses in interface_addresses().items()
        for address in addresses
        if interface in {None, name} and not ip_address(address).is_loopback
    ]


def head_hosts(name: str, addresses: Sequence[str], interface: str | None = None) -> list[str]:
    """Where to try the head node, in this order. With an interface not by its name, which may lead to another one."""
    return [*([] if interface else [name]), *addresses]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address; None if no interface has it."""
    return next((name for name, addresses in interface_addresses().items() if address in addresses), None)
