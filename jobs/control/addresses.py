"""The network addresses at which this node's agent may be reached, and their interfaces. Runs on compute nodes.

Host names often do not work: a node's own name may resolve to 127.0.1.1, and another node's name may resolve to no
address, or to one in a network that is closed between compute nodes. So the first node's agent publishes all its
addresses in its claim. The others try them until they find one that works (jobs.control.channel).
"""

from collections.abc import Sequence
from ipaddress import ip_address

from hpc.base.kernel import interface_addresses


def own_addresses(interface: str | None = None) -> list[str]:
    """Return the addresses at which other nodes may reach this one: all but loopback, or only those of `interface`."""
    return [
        address
        for name, addresses in interface_addresses().items()
        for address in addresses
        if interface in {None, name} and not ip_address(address).is_loopback
    ]


def first_node_hosts(name: str, addresses: Sequence[str], interface: str | None = None) -> list[str]:
    """Return the hosts at which to try the first node: name and addresses; with an interface, only its addresses."""
    return [*([] if interface else [name]), *addresses]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if no interface has it."""
    return next((name for name, addresses in interface_addresses().items() if address in addresses), None)
