"""The network between the nodes: one switch, one cable to each node and one to the login host. Runs as root.

The bridge stands in a network namespace of its own. In the machine's, a firewall would see its frames too: Docker's
default of dropping what is forwarded cuts the nodes off from each other.
"""

import os

from hpc.testbed.layout import LOGIN_ADDRESS, TestbedNode, TestbedPaths
from hpc.testbed.namespaces import inside, pin, unpin
from hpc.testbed.system import run, succeeds

LOGIN_INTERFACE = "torchrelay0"


def create_switch(places: TestbedPaths) -> None:
    """Pin the switch's namespace with the bridge in it, and plug the login host in."""
    pin(places.switch_net)
    switch = inside(places.switch_net)
    run(*switch, "ip", "link", "add", "switch", "type", "bridge")
    run(*switch, "ip", "link", "set", "switch", "up")
    login = ("peer", "name", LOGIN_INTERFACE, "netns", str(os.getpid()))
    run(*switch, "ip", "link", "add", "login", "type", "veth", *login)
    run(*switch, "ip", "link", "set", "login", "master", "switch", "up")
    run("ip", "address", "add", f"{LOGIN_ADDRESS}/24", "dev", LOGIN_INTERFACE)
    run("ip", "link", "set", LOGIN_INTERFACE, "up")


def remove_switch(places: TestbedPaths) -> None:
    """Unplug the login host and let the bridge go with its namespace. No error if there is none."""
    if succeeds("ip", "link", "show", LOGIN_INTERFACE):
        run("ip", "link", "delete", LOGIN_INTERFACE)
    unpin(places.switch_net)


def plug_in(node: TestbedNode, places: TestbedPaths) -> None:
    """Give the node, whose namespace is pinned, an eth0 that hangs on the switch."""
    switch = inside(places.switch_net)
    peer = ("peer", "name", "eth0", "netns", str(places.node_net(node.name)))
    run(*switch, "ip", "link", "add", node.name, "type", "veth", *peer)
    run(*switch, "ip", "link", "set", node.name, "master", "switch", "up")


def silence(name: str, places: TestbedPaths) -> None:
    """Take the node's link down at the switch: what its dying sockets still send reaches nobody."""
    switch = inside(places.switch_net)
    if places.switch_net.exists() and succeeds(*switch, "ip", "link", "show", name):
        run(*switch, "ip", "link", "set", name, "down")


def unplug(name: str, places: TestbedPaths) -> None:
    """Remove the node's cable. No error if there is none.

    Both ends go at once. Left to end with its namespace, the link would live on as long as the dead node's sockets
    have data to send, and greet the revived node with it.
    """
    switch = inside(places.switch_net)
    if places.switch_net.exists() and succeeds(*switch, "ip", "link", "show", name):
        run(*switch, "ip", "link", "delete", name)
