"""Limits of the testbed's nodes that can change while jobs run: CPU time per node, and what its link carries. As root.

All nodes share the cores of one machine, so a node would become slower as nodes are added. With a quota each node has
the same share of a core, 1 node as well as 4: slow nodes, but as many as the cores hold are all as fast as one. The
quota is the kernel's (CFS bandwidth), in cgroups of our own: slurmd is moved into one, and its jobs inherit it.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hpc.cluster.testbed.layout import TestbedNode, node_net
from hpc.cluster.testbed.nodes import inside, processes
from hpc.cluster.testbed.system import run, succeeds, wait_until

# Short, or a rank would compute at full speed for a while and then stand still, which the all-reduce of the others
# would see.
_PERIOD_MICROSECONDS = 10_000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


class CpuQuotas:
    """A cgroup for each node. Version 1 of cgroups has been run, version 2 has not."""

    def __init__(self) -> None:
        self._is_v1 = (_V1 / "cpu.cfs_quota_us").exists()
        if not self._is_v1:
            (_V2 / "cgroup.subtree_control").write_text("+cpu")
        self._groups = list[Path]()

    def add(self, nodes: Sequence[TestbedNode]) -> None:
        """Move the processes of these nodes, and all that they will start, into groups."""
        for node in nodes:
            group = (_V1 if self._is_v1 else _V2) / f"torchrelay-scaling-{os.getpid()}-{node.name}"
            group.mkdir()
            self._groups.append(group)
            for pid in processes(node_net(node.name)):
                (group / "cgroup.procs").write_text(str(pid))

    def set(self, share: float | None) -> None:
        """Give each node this many cores; None: as many as it gets.

        With a quota the nodes come before everything else on the machine, or they would get less than their quota while
        something else runs. Without one they compete like everybody.
        """
        quota = -1 if share is None else round(share * _PERIOD_MICROSECONDS)
        values: dict[str, int | str] = {
            "cpu.shares": 1024 if share is None else 32 * 1024, "cpu.cfs_period_us": _PERIOD_MICROSECONDS,
            "cpu.cfs_quota_us": quota,
        } if self._is_v1 else {
            "cpu.weight": 100 if share is None else 3200,
            "cpu.max": f"{'max' if share is None else quota} {_PERIOD_MICROSECONDS}",
        }  # fmt: skip
        for group in self._groups:
            for name, value in values.items():
                (group / name).write_text(str(value))

    def remove(self) -> None:
        """Remove the cgroups. Their processes must have been killed."""
        for group in self._groups:
            wait_until(partial(_is_empty, group), seconds=20, what=f"the processes in {group} to end")
            group.rmdir()


def _is_empty(group: Path) -> bool:
    return not (group / "cgroup.procs").read_text()


def shape_links(nodes: Sequence[TestbedNode], rate: str | None) -> None:
    """Limit what each node sends; None: nothing but the CPU limits it."""
    for node in nodes:
        tc = (*inside(node_net(node.name)), "tc", "qdisc")
        if rate is None:
            # There may be none.
            succeeds(*tc, "delete", "dev", "eth0", "root")
        else:
            # As `hpc testbed up --shape-network`, which says why.
            run(*tc, "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
