"""Decides how long an attempt waits for silent nodes before it gives up its allocation. Runs in every agent.

A link that is lost for seconds (a bond that fails over, a virtual machine that moves) looks like a dead node. Slurm may
take hours to allocate other nodes. So the ranks are ended at once, and the allocation is kept for some time.
"""

import threading
import time
from collections.abc import Sequence

from hpc.base.errors import TorchrelayError
from hpc.slurm import client as slurm
from hpc.slurm import sinfo, squeue
from jobs.node_attempt import NodeAttempt, log

# Below a minute: after a minute without a heartbeat of the first node's agent the supervisor continues the run, and the
# snapshots in the memory of the other nodes are lost.
LINK_SECONDS = 45.0
"""Seconds for which agents wait for a silent node whose link may come back."""
_ASK_SECONDS = 5.0
# The first node's agent reports a node that is cut off within this time of the loss that the node itself sees.
_REPORT_SECONDS = 2.0


class Patience:
    """Decides by the states of silent nodes in Slurm how long to wait for them. A background thread asks Slurm."""

    def __init__(self, node: NodeAttempt) -> None:
        self._node = node
        self._known = dict[Sequence[str], float]()
        self._next = 0.0
        self._thread = threading.Thread()

    def seconds(self, silent: Sequence[str]) -> float:
        """Return the seconds of silence after which these nodes count as dead."""
        if not self._node.on_slurm:
            return 0.0
        names = tuple(silent)
        if time.monotonic() > self._next and not self._thread.is_alive():
            self._next = time.monotonic() + _ASK_SECONDS
            self._thread = threading.Thread(target=self._ask, args=(names,), daemon=True, name="patience")
            self._thread.start()
        return self._known.get(names, LINK_SECONDS)

    def _ask(self, names: tuple[str, ...]) -> None:
        resources, needed = self._node.spec.resources, self._node.spec.job_nodes.fewest
        try:
            dead = sinfo.dead_nodes(list(names))
            idle = sinfo.idle_nodes(resources.partition)
            idle -= {*names, *(slurm.hostnames(resources.exclude) if resources.exclude else ())}
            # The other nodes of this job become free when it ends, but other jobs in the queue may get them.
            with_own = idle.union(self._node.allocation.hostnames).difference(names)
            can_start = len(idle) >= needed or (len(with_own) >= needed and not squeue.has_queue(resources.partition))
        except TorchrelayError as error:
            log(f"Slurm does not report the state of {', '.join(names)}: {error}")
            return
        if set(dead) != set(names) and (not can_start or self._is_cut_off(len(names))):
            self._known[names] = LINK_SECONDS
        else:
            # If it can start at once, a new job trains again as soon as this one would when a link is back.
            self._known[names] = 0.0

    def _is_cut_off(self, num_silent: int) -> bool:
        """Return whether other nodes continue without this one. If it left, the job would lack it until its end."""
        if self._node.allocation.num_nodes - num_silent < self._node.spec.fewest_to_continue:
            return False
        time.sleep(_REPORT_SECONDS)
        try:
            return self._node.host in self._node.reported_lost()
        except OSError:
            return True  # this node has probably lost the storage, too
