"""Owns the rendezvous of a round's torchruns, with known members and authenticated connections. Runs once per node.

The coordinator chooses the members (jobs.control.round_members) and replaces lost ones. Here the members only wait for
each other, at the start and whenever ranks of a member have died. torch's own backends do not suffice:

- `c10d` keeps its state as a pickle in a store. Anyone on the network can write to the store, and so run code as the
  user on all nodes.
- `static` never tells a node that another node's ranks have died: its `num_nodes_waiting` is always 0. Anyone can write
  to its store, too, and the ranks of all restarts share it.

The first member's torchrun keeps the members' reports. Each report is a member's whole state and is sent repeatedly, so
connections may break. Each start of the ranks is a generation. A member enters one after all entered the one before.
"""

import os
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

from torch.distributed import Store  # type: ignore[attr-defined]  # exported, but not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from hpc.base.environment import RESTARTS
from hpc.base.transport import Connection, DecodeError, Limits, Server, connect, listen
from hpc.base.units import PortRange

BACKEND = "torchrelay"
# Importing torch from slow storage may take minutes.
_ARRIVAL_SECONDS = 600.0
_POLL_SECONDS = 0.2
# The pause between reports while members wait for the last one. It is short, because no ranks run meanwhile.
_MEETING_POLL_SECONDS = 0.03
# If ranks fail as soon as they start, the coordinator decides within two seconds whether they start again. Without this
# pause, torchrun would meanwhile start a broken script ten times.
_MIN_BETWEEN_STARTS_SECONDS = 3.0
# Limits all nodes' reports to a thousand a second; to answer them takes a fifth of a core on the first node. The limit
# matters in rounds of more than 200 nodes, or of more than 30 while the nodes wait for each other.
_POLL_SECONDS_PER_NODE = 0.001
_LIMITS = Limits(timeout_seconds=5.0, max_message_bytes=2**12)


class _Members:
    """Keeps the members' reports. Runs in the first member's torchrun."""

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._generations, self._ended, self._master = [0] * number, set[int](), ("", 0)

    def take(self, report: dict[str, Any]) -> dict[str, Any]:
        """Keep a member's report, and return the answer. Raises DecodeError if it is not a valid report."""
        match report:
            case {"node": int(node), "generation": int(generation), "ended": bool(ended), "master": [str(), int()]}:
                pass
            case _:
                raise DecodeError(f"another node of the round sent {report}")
        if node not in range(len(self._generations)):
            raise DecodeError(f"node {node} is not a member")
        with self._lock:
            self._generations[node] = generation
            if ended:
                self._ended.add(node)
            if node == 0:
                self._master = report["master"]
            return {
                "arrived": sum(each >= generation for each in self._generations),
                "waiting": sum(each > generation for each in self._generations),
                "ended": len(self._ended),
                "master": self._master,
            }

    def serve(self, connection: Connection) -> None:
        """Answer the reports of another member until its connection ends."""
        while True:
            connection.send(self.take(connection.receive()))


class NodeRendezvous(RendezvousHandler):
    """A member's side of the rendezvous. Only one thread may use it."""

    def __init__(self, parameters: RendezvousParameters, secret: str) -> None:
        """Listen for the others if this is the first member. All torchruns of the attempt have the same `secret`."""
        self._node, self._num_nodes = int(parameters.get("rank")), parameters.max_nodes
        self._address, self._run_id, self._secret = parameters.local_addr or "", parameters.run_id, secret
        ports = parameters.get("ports")
        self._ports = PortRange.parse(ports).ports if ports else range(0)
        host, _, port = parameters.endpoint.rpartition(":")
        self._endpoint = host.strip("[]"), int(port)
        self._generation, self._ended, self._master = 0, False, ("", 0)
        self._poll_seconds = max(_POLL_SECONDS, _POLL_SECONDS_PER_NODE * self._num_nodes)
        self._next_look = 0.0
        self._next_start = 0.0
        self._connection: Connection | None = None
        self._met = self._host_has_left = False
        self._members: _Members | None = None
        if self._node == 0:
            self._members = _Members(self._num_nodes)
            # The torchruns of all rounds have the same secret. The run id tells the rounds apart.
            self._server = Server(secret, self._run_id, self._members.serve, _LIMITS, [self._endpoint[1]])

    def get_backend(self) -> str:
        """Return the backend's name, as registered in torchrun."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the name of the round."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all members have called this as often as this one, and return the master address for new ranks.

        Raises:
            RendezvousError: a member has ended, or has not called this within ten minutes.
        """
        self._generation += 1
        if self._node == 0:
            # Each generation of ranks has a new store: an earlier one holds addresses of dead ranks.
            with listen(self._ports) as free:
                self._master = self._address, int(free.getsockname()[1])
        deadline = time.monotonic() + _ARRIVAL_SECONDS
        while time.monotonic() < deadline:
            answer = self._report()
            if self._host_has_left:
                raise RendezvousConnectionError("the torchrun of the round's first node has ended")
            # If all members have arrived, `ended` is no problem: another node's ranks may have started and finished.
            has_arrived = answer.get("arrived") == self._num_nodes
            if answer.get("ended") and not has_arrived:
                raise RendezvousClosedError("the ranks of another node have ended, and cannot be restarted")
            if has_arrived and time.monotonic() >= self._next_start:
                self._next_start = time.monotonic() + _MIN_BETWEEN_STARTS_SECONDS
                address, port = answer["master"]
                # The ranks read this: TORCHELASTIC_RESTART_COUNT stays 0 if ranks of another node caused the restart.
                os.environ[RESTARTS] = str(self._generation - 1)
                store = cast("Store", _ExitBarrier(self))
                return RendezvousInfo(store, self._node, self._num_nodes, RendezvousStoreInfo(address, port))
            time.sleep(max(_MEETING_POLL_SECONDS, _POLL_SECONDS_PER_NODE * self._num_nodes))
        raise RendezvousTimeoutError(f"not all {self._num_nodes} nodes arrived within {_ARRIVAL_SECONDS:.0f} s")

    def num_nodes_waiting(self) -> int:
        """Return how many members wait for new ranks. If any does, torchrun restarts this node's ranks, too."""
        if time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + self._poll_seconds
        return int(self._report().get("waiting", 0))

    def wait_for_end(self) -> None:
        """Report that this node's ranks have ended, and wait until the ranks of all members have ended."""
        self._ended = True
        while self._report().get("ended") != self._num_nodes and not self._host_has_left:
            time.sleep(self._poll_seconds)

    def is_closed(self) -> bool:
        """Return False, since only the coordinator ends rounds."""
        return False

    def set_closed(self) -> None:
        """Do nothing, since only the coordinator ends rounds."""

    def shutdown(self) -> bool:
        """Close the connections, and return True."""
        if self._connection:
            self._connection.close()
        if self._members:
            self._server.close()
        return True

    def _report(self) -> dict[str, Any]:
        """Report this member's state to the first one, and return the answer, or an empty dict if none comes."""
        report = {
            "node": self._node, "generation": self._generation, "ended": self._ended, "master": self._master
        }  # fmt: skip
        if self._members:
            self._server.check()
            return self._members.take(report)
        try:
            self._connection = self._connection or connect(self._endpoint, self._secret, self._run_id, _LIMITS)
            self._connection.send(report)
            answer = self._connection.receive()
            self._met = True
        except OSError as error:
            # The first member listens until it ends, so a refusal means that it has ended. Other errors may pass.
            self._host_has_left = self._met and isinstance(error, ConnectionRefusedError)
            if self._connection:
                self._connection.close()
            self._connection = None
            return {}
        return answer


class _ExitBarrier:
    """Replaces the store with which torchrun waits for the other members before it ends."""

    timeout = timedelta()

    def __init__(self, rendezvous: NodeRendezvous) -> None:
        self._rendezvous = rendezvous

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, since the coordinator ends nodes that wait too long."""

    def add(self, _key: str, _amount: int) -> int:
        """Return 0, so that torchrun does not take this member for the last one."""
        return 0

    def wait(self, _keys: Iterable[str]) -> None:
        """Wait until the ranks of all members have ended."""
        self._rendezvous.wait_for_end()
