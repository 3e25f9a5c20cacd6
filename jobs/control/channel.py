"""The control channel: a connection from every agent of an attempt to the first node's agent.

Runs on compute nodes. Every other agent sends its status about twice a second, and gets a changed directive back.
The channel reveals a dead node in seconds. Slurm would take minutes, and files on shared storage up to a minute.
Connections are authenticated with the attempt's secret, which is in the run directory (hpc.base.transport).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import msgspec

from hpc.base.kernel import interface_addresses, steady_time
from hpc.base.transport import Connection, DecodeError, Limits, Server, connect
from jobs.control.messages import Answer, Directive, NodeStatus, Phase, decode
from jobs.node_attempt import log

# A node counts as dead after five seconds of silence: busy machines and switches may interrupt it for two seconds.
LOST_SECONDS = 5.0
_SEND_SECONDS = 0.5
_SEND_WAITING_SECONDS = 0.1
_ANSWER_SECONDS = 2.0
# After a broken connection a node has only this long, not LOST_SECONDS, to reconnect.
_RECONNECT_SECONDS = 1.5
_SERVER_LIMITS = Limits(timeout_seconds=2 * LOST_SECONDS, max_message_bytes=2**20)
_CLIENT_LIMITS = Limits(timeout_seconds=_ANSWER_SECONDS, max_message_bytes=2**20)
_TICK_SECONDS, _SUSPENDED_SECONDS = 0.1, 2.0
_PURPOSE = "control"
ALONE = "127.0.0.1"
"""Address of this node while no other node is connected."""


# Host names often do not work: a node's own name may resolve to 127.0.1.1, and another node's name may resolve to no
# address, or to one in a network that is closed between compute nodes. So the first node's agent publishes all its
# addresses in its claim, and the others try them until they find one that works.


def own_addresses(interface: str | None = None) -> list[str]:
    """Return the addresses at which other nodes may reach this one: all but loopback, or only those of `interface`."""
    return [
        address
        for name, addresses in interface_addresses().items()
        for address in addresses
        if interface in {None, name} and not ip_address(address).is_loopback
    ]


def first_node_hosts(name: str, addresses: Sequence[str], interface: str | None = None) -> list[str]:
    """Return the hosts at which to try the first node: its name and `addresses`, or only `addresses` of `interface`.

    A first node without this interface is reached by its name, to report that it is bad.
    """
    return [*addresses] if interface and addresses else [name, *addresses]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if no interface has it."""
    return next((name for name, addresses in interface_addresses().items() if address in addresses), None)


class AgentClock:
    """Measures the time since an event, at most since the end of this agent's last suspension.

    Slurm stops all processes of a job that it suspends (SUSPEND, GANG), and a virtual machine stops while it is moved.
    A stopped agent hears nothing. A thread that only ticks tells such a pause from a loop that waits for slow storage.
    """

    def __init__(self) -> None:
        self._ticked = self._resumed = time.monotonic()
        threading.Thread(target=self._keep_ticking, daemon=True, name="agent-clock").start()

    def _keep_ticking(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            # Set _resumed before _ticked, because `since` reads _ticked first.
            self._resumed = now if now - self._ticked > _SUSPENDED_SECONDS else self._resumed
            self._ticked = now

    def since(self, moment: float) -> float:
        """Return the seconds from a time.monotonic() value, or from the end of a later suspension, to the last tick."""
        ticked = self._ticked
        return max(0.0, ticked - max(moment, self._resumed))


def _hangs(status: NodeStatus, unreported_seconds: float, timeout_seconds: float) -> bool:
    """Return whether an agent hangs before the training: its main thread waits for a mount and reports nothing.

    During the training the main thread may wait: the ranks go on as long as they need no shared storage.
    """
    return status.phase is Phase.STARTING and unreported_seconds > timeout_seconds


def _after_break(heard: float) -> float:
    """Return when an agent counts as last heard once its connection broke or was refused: it has 1.5 s to reconnect."""
    return min(heard, time.monotonic() - (LOST_SECONDS - _RECONNECT_SECONDS))


class ControlServer:
    """The first node's end of the channel: keeps the last status of every node, and the directive for all nodes."""

    first_node_is_silent = False
    clock_skew_seconds = 0.0

    def __init__(
        self, secret: str, num_nodes: int, ports: Sequence[int] = (), *, timeout_seconds: float = float("inf")
    ) -> None:
        """Listen on one of `ports`; if `ports` is empty, the kernel chooses a port.

        If this agent hangs for `timeout_seconds` before the training, it no longer answers the other agents. They then
        count it as lost.
        """
        self._num_nodes = num_nodes
        self.directive = Directive()
        """Directive for all nodes, always assigned as a whole, so that no lock is needed."""
        self.status = NodeStatus(node_rank=0)
        """This node's own status."""
        self._timeout_seconds = timeout_seconds
        self._reported_at = time.monotonic()
        self._statuses: dict[int, NodeStatus] = {}
        self.clock = AgentClock()
        self._heard: dict[int, float] = {}
        self._ended = set[int]()
        self._addresses = dict[int, str]()
        self.own_address = ALONE
        """The address at which the other nodes reach this one."""
        self._server = Server(secret, _PURPOSE, self._serve, _SERVER_LIMITS, ports)
        self.port, self.close, self.check = self._server.port, self._server.close, self._server.check

    def report(self, **changes: Any) -> None:
        """Change fields of this node's own status."""
        self._reported_at = time.monotonic()
        self.status = replace(self.status, **changes)
        self._take(self.status)

    def _take(self, status: NodeStatus) -> None:
        self._statuses[status.node_rank] = status
        self._heard[status.node_rank] = time.monotonic()
        self._ended.discard(status.node_rank)

    def statuses(self) -> dict[int, NodeStatus]:
        """Return the last status by node rank, of the nodes that have reported."""
        return dict(self._statuses)

    def address(self, node_rank: int) -> str:
        """Return the address at which others reach a node: the address it has connected from, or this node's own."""
        return self._addresses.get(node_rank, self.own_address)

    def silent_seconds(self, node_rank: int) -> float | None:
        """Return for how many seconds a node has been silent; None if it has never reported."""
        heard = self._heard.get(node_rank)
        return None if heard is None else self.clock.since(heard)

    def is_silent(self, node_rank: int) -> bool:
        """Return whether a node that has reported has been silent for so long that it is lost."""
        return (self.silent_seconds(node_rank) or 0.0) > LOST_SECONDS

    def has_ended(self, node_rank: int) -> bool:
        """Return whether a silent agent has ended: its kernel closed the connection, so the node itself is not dead."""
        return node_rank in self._ended

    def _serve(self, connection: Connection) -> None:
        node_rank = sent = None
        try:
            while True:
                status = decode(connection.receive(), NodeStatus)
                if status.node_rank not in range(1, self._num_nodes):
                    raise DecodeError(f"there is no other node {status.node_rank}")
                self._addresses[status.node_rank], self.own_address = connection.peer_address, connection.local_address
                self._take(status)
                node_rank = status.node_rank
                if _hangs(self.status, self.clock.since(self._reported_at), self._timeout_seconds):
                    return
                # Send only a changed directive: it names all members: a large job's first node would be busy.
                directive = self.directive
                changed = {} if directive is sent else {"directive": directive.as_json}
                connection.send({"time": steady_time(), **changed})
                sent = directive
        except OSError as error:
            if not isinstance(error, ConnectionError):
                node_rank = None  # a timeout: only the silence counts
            raise
        finally:
            if node_rank is not None:
                self._heard[node_rank] = _after_break(self._heard[node_rank])
                self._ended.add(node_rank)


class ControlClient:
    """Another node's end of the channel: sends its status to the first node, and keeps the newest directive."""

    def __init__(
        self, hosts: Sequence[str], port: int, secret: str, status: NodeStatus, *,
        timeout_seconds: float = float("inf"),
    ) -> None:  # fmt: skip
        """Start a thread that stays connected to the first node's agent until `close`, and sends it `status` first.

        The thread tries `hosts`, the first node's names and addresses, in this order, until one of them works.
        If this agent hangs for `timeout_seconds` before the training, the thread sends nothing any more.
        """
        self._timeout_seconds = timeout_seconds
        self._reported_at = time.monotonic()
        self.directive, self.status = Directive(), status
        self.clock_skew_seconds = 0.0
        """Seconds by which the first node's clock was ahead of this node's at the first answer."""
        self.met = threading.Event()
        """Set when the first node has answered for the first time."""
        self.first_node_has_ended = False
        """Whether the silent first node's agent has ended: its kernel has closed or refused the connection."""
        self.hosts, self._port, self._secret = hosts, port, secret
        self.first_node_address = self.own_address = ALONE
        """Addresses at which this node reaches the first node, and at which other nodes reach this one."""
        self.clock = AgentClock()
        self._heard = time.monotonic()
        self._changed, self._closed = threading.Event(), threading.Event()
        self._defect: Exception | None = None
        self._thread = threading.Thread(target=self._keep_connected, daemon=True, name="control-client")
        self._thread.start()

    def report(self, **changes: Any) -> None:
        """Change fields of this node's status, and send it at once if other nodes wait for the change."""
        self._reported_at = time.monotonic()
        before, self.status = self.status, replace(self.status, **changes)
        keys = ("phase", "round", "caches")
        if any(getattr(before, key) != getattr(self.status, key) for key in keys):
            self._changed.set()

    def check(self) -> None:
        """Raise an unexpected error of the thread, once, as `Server.check` does."""
        defect, self._defect = self._defect, None
        if defect:
            raise defect

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the first node has been silent."""
        return self.clock.since(self._heard)

    @property
    def first_node_is_silent(self) -> bool:
        """Whether the first node's agent, once met, has been silent for more than LOST_SECONDS."""
        return self.met.is_set() and self.silent_seconds > LOST_SECONDS

    def close(self) -> None:
        """Send the last status once more, and stop."""
        self._closed.set()
        self._changed.set()
        self._thread.join(_ANSWER_SECONDS * 2)

    def _keep_connected(self) -> None:
        closing = False
        while not closing:
            # After `close`, connect once more to send the last status: the connection may have just broken.
            closing = self._closed.is_set()
            # Once the first node has answered, reconnect only to the address that worked: others may lead nowhere.
            for host in [self.first_node_address] if self.met.is_set() else self.hosts:
                try:
                    with connect((host, self._port), self._secret, _PURPOSE, _CLIENT_LIMITS) as connection:
                        self.first_node_address, self.own_address = connection.peer_address, connection.local_address
                        self._exchange(connection)
                        return
                except ConnectionError as error:
                    if isinstance(error, DecodeError):
                        log(f"the connection to the first node's agent ends: {error}")
                    self._heard, self.first_node_has_ended = _after_break(self._heard), True
                except OSError:
                    pass  # a timeout: only the silence counts
                except Exception as error:  # noqa: BLE001 - `check` raises it, and this thread reports the agent's end
                    self._defect = error
                if self.met.is_set():
                    break
            self._closed.wait(_SEND_SECONDS)

    def _exchange(self, connection: Connection) -> None:
        """Send the status and read the answer repeatedly, until the connection fails or the client is closed."""
        while True:
            closing = self._closed.is_set()
            self._changed.clear()
            if _hangs(self.status, self.clock.since(self._reported_at), self._timeout_seconds):
                raise TimeoutError
            sent_at = steady_time()
            connection.send(msgspec.to_builtins(self.status))
            answer = decode(connection.receive(), Answer)
            self._heard, self.first_node_has_ended = time.monotonic(), False
            if answer.directive:
                self.directive = answer.directive
            if not self.met.is_set():
                self.clock_skew_seconds = answer.time - (sent_at + steady_time()) / 2
                self.met.set()
            if closing:
                return
            # A node that stages waits for the first node's directive, and others wait for its status. A node that has
            # left waits for the end of the first node's agent.
            waits = self.status.phase in {Phase.STARTING, Phase.LEFT}
            self._changed.wait(_SEND_WAITING_SECONDS if waits else _SEND_SECONDS)


ControlChannel = ControlServer | ControlClient
"""One node's end of the control channel."""
