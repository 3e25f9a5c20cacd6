"""Compute nodes: power on, power off. Runs as root on the testbed's machine."""

from hpc.testbed import namespaces, network
from hpc.testbed.layout import TestbedNode, TestbedPaths
from hpc.testbed.system import start


def power_on(node: TestbedNode, places: TestbedPaths) -> None:
    """Boot a node: fresh namespaces, empty /tmp and /dev/shm, slurmd. Returns before slurmctld knows of it."""
    pin = places.node_net(node.name)
    namespaces.pin(pin)
    network.plug_in(node, places)
    # Not `ip netns exec`: it mounts another /sys, without the cgroups that slurmd wants to see.
    fresh = namespaces.inside_fresh(pin, "mount", "uts")
    start(*fresh, "/bin/sh", places.boot_script(node), log=places.log(f"{node.name}.boot"))


def power_off(name: str, places: TestbedPaths) -> None:
    """End a node as a power cut does: its peers hear nothing, not even a reset; its memory file systems are gone."""
    network.silence(name, places)
    namespaces.kill_all(places.node_net(name))
    network.unplug(name, places)
    namespaces.unpin(places.node_net(name))
