"""Powers the testbed's nodes on and off, with their namespaces and network. Runs as root on the testbed's machine.

Every process of the testbed runs in a namespace that is pinned to a file. A node's processes run in the node's network
namespace, and the login host's daemons run in a host-name namespace. The namespace identifies these processes, even if
they fork or lose their pid files, and no other process is touched.
"""

import contextlib
import os
import signal
from pathlib import Path

from hpc.base.errors import UserError
from hpc.cluster.testbed import layout
from hpc.cluster.testbed.layout import LOGIN_ADDRESS, TestbedNode
from hpc.cluster.testbed.system import run, start, succeeds, wait_until

_LOGIN_INTERFACE = "torchrelay0"

# --- namespaces ---


def pin(path: Path, *command: str) -> None:
    """Create a namespace, pin it to a file whose suffix names its kind (`.net`), and run `command` once in it."""
    path.touch()
    run("unshare", f"--{path.suffix[1:]}={path}", *(command or ("true",)))


def inside(path: Path) -> tuple[str, ...]:
    """Return the words to put before a command so that it runs in a pinned namespace."""
    return ("nsenter", f"--{path.suffix[1:]}={path}", "--")


def inside_fresh(path: Path, *kinds: str) -> tuple[str, ...]:
    """Return the words of `inside`, extended so that the command also gets new namespaces of these kinds."""
    # Later mounts of the machine, such as an automounted home, appear inside; mounts made inside stay inside.
    options = (f"--{kind}" for kind in kinds)
    return (*inside(path), "unshare", *options, "--propagation=slave", "--")


def unpin(path: Path) -> None:
    """Unpin a namespace, if it exists, so that it ends with its last process."""
    if not path.exists():
        return
    # An interrupted `up` may have left a plain file without a namespace.
    if path.stat().st_dev != path.parent.stat().st_dev:
        run("umount", "--no-mtab", path)
    path.unlink()


def processes(path: Path) -> list[int]:
    """Return the ids of all processes in a pinned namespace; an empty list if the namespace does not exist."""
    try:
        pinned = path.stat()
    except FileNotFoundError:
        return []
    link = f"ns/{path.suffix[1:]}"
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # A zombie, or a process that ends meanwhile, has no namespace.
        with contextlib.suppress(OSError):
            if os.path.samestat(pinned, (entry / link).stat()):
                found.append(int(entry.name))
    return found


def kill_all(path: Path) -> None:
    """Send SIGKILL to every process in a pinned namespace until none is left.

    Raises UserError if this process itself is in the namespace, or TorchrelayError if some processes did not end within
    20 s.
    """
    if os.getpid() in processes(path):
        raise UserError(f"this shell is inside the testbed ({path.name}): type the command outside of its nodes")

    def none_left() -> bool:
        left = processes(path)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(none_left, seconds=20, what=f"the killed processes in {path} to end")


# --- the network: a bridge with one link to each node and one to the login host ---


def create_switch() -> None:
    """Create the bridge and connect the login host.

    The bridge has its own network namespace. In the machine's namespace, a firewall would see its frames: Docker drops
    forwarded packets by default, which would disconnect the nodes from each other.
    """
    pin(layout.SWITCH_NET)
    switch = inside(layout.SWITCH_NET)
    run(*switch, "ip", "link", "add", "switch", "type", "bridge")
    run(*switch, "ip", "link", "set", "switch", "up")
    login = ("peer", "name", _LOGIN_INTERFACE, "netns", str(os.getpid()))
    run(*switch, "ip", "link", "add", "login", "type", "veth", *login)
    run(*switch, "ip", "link", "set", "login", "master", "switch", "up")
    run("ip", "address", "add", f"{LOGIN_ADDRESS}/24", "dev", _LOGIN_INTERFACE)
    run("ip", "link", "set", _LOGIN_INTERFACE, "up")


def remove_switch() -> None:
    """Disconnect the login host and remove the bridge, if they exist."""
    if succeeds("ip", "link", "show", _LOGIN_INTERFACE):
        run("ip", "link", "delete", _LOGIN_INTERFACE)
    unpin(layout.SWITCH_NET)


def _change_link(name: str, *change: str) -> None:
    """Run `ip link` with the arguments `change` in the switch's namespace, if the link `name` exists."""
    switch = inside(layout.SWITCH_NET)
    if layout.SWITCH_NET.exists() and succeeds(*switch, "ip", "link", "show", name):
        run(*switch, "ip", "link", *change)


# --- power ---


def power_on(node: TestbedNode) -> None:
    """Boot a node with new namespaces, empty /tmp and /dev/shm, and slurmd. slurmctld does not know the node yet."""
    pin(layout.node_net(node.name))
    switch = inside(layout.SWITCH_NET)
    peer = ("peer", "name", "eth0", "netns", str(layout.node_net(node.name)))
    run(*switch, "ip", "link", "add", node.name, "type", "veth", *peer)
    run(*switch, "ip", "link", "set", node.name, "master", "switch", "up")
    # `ip netns exec` would mount another /sys, without the cgroups that slurmd needs.
    fresh = inside_fresh(layout.node_net(node.name), "mount", "uts")
    start(*fresh, "/bin/sh", layout.boot_script(node.name), log=layout.log_of(f"{node.name}.boot"))


def power_off(name: str) -> None:
    """End a node as a power cut does: peers receive nothing, not even a TCP reset; /tmp and /dev/shm are lost."""
    # The link goes down first: the last packets of dying processes must reach nobody.
    _change_link(name, "set", name, "down")
    kill_all(layout.node_net(name))
    # Both ends are deleted now. If the link ended with its namespace, it would live as long as the dead node's sockets
    # have data to send, and would send them to the revived node.
    _change_link(name, "delete", name)
    unpin(layout.node_net(name))
