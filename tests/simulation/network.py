"""The network between the simulated hosts, and the connections of the control channel (hpc.base.transport)."""

import errno
import json
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Self

from hpc.base.transport import DecodeError, Limits, TransportError
from simulation.world import Process, Task, World

_CONNECT_SECONDS = 5.0
_MEAN_DELAY_SECONDS = 0.002
# TCP sends again after pauses that double.
_RESEND_SECONDS = 0.4


class Network:
    """Which hosts reach which."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = set[str]()
        """Hosts without power: nothing there answers."""
        self.open = set[SimulatedConnection]()
        """The ends of connections that their processes have not closed."""
        self._cut = dict[tuple[str, str], float]()
        """Until when the packets from one host to another are lost."""
        self._listening = dict[tuple[str, int], "SimulatedServer"]()
        self._ports = 10_000

    def cut(self, source: str, target: str, until: float) -> None:
        """Lose the packets from one host to another."""
        self._cut[source, target] = max(until, self._cut.get((source, target), 0.0))

    def is_cut(self, source: str, target: str) -> bool:
        return self._cut.get((source, target), 0.0) > self.world.now

    def open_at(self, source: str, target: str) -> float:
        """Return when a packet that is sent now arrives, after it has been sent again and again."""
        delay = self.world.random.expovariate(1 / _MEAN_DELAY_SECONDS)
        until = self._cut.get((source, target), 0.0)
        if until <= self.world.now:
            return self.world.now + delay
        return until + delay + self.world.random.uniform(0.0, _RESEND_SECONDS)

    def is_connected(self, host: str) -> bool:
        return any(connection.process.host == host for connection in self.open)

    def free_port(self) -> int:
        """Return a port that nobody has had."""
        self._ports += 1
        return self._ports

    def listen(self, server: "SimulatedServer") -> None:
        self._listening[server.process.host, server.port] = server

    def connect(self, address: tuple[str, int], limits: Limits) -> "SimulatedConnection":
        """Connect the running process to a server. Raises OSError as a socket does."""
        world, here = self.world, self.world.process.host
        host, port = address
        sent = self.open_at(here, host)
        answered = max(sent, self.open_at(host, here))
        if host in self.dead or answered - world.now > _CONNECT_SECONDS:
            world.wait(_CONNECT_SECONDS)
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        world.wait(answered - world.now)
        server = self._listening.get((host, port))
        if server is None or not server.process.alive:
            if host in self.dead:
                world.wait(_CONNECT_SECONDS)
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        ours = SimulatedConnection(self, world.process, limits)
        theirs = SimulatedConnection(self, server.process, server.limits)
        ours.peer, theirs.peer = theirs, ours
        world.spawn(server.process, lambda: server.converse(theirs))
        return ours


class SimulatedConnection:
    """Stands for hpc.base.transport.Connection."""

    peer: "SimulatedConnection"

    def __init__(self, network: Network, process: Process, limits: Limits) -> None:
        self._network, self.process, self._limits = network, process, limits
        self._arrived = deque[tuple[float, str]]()
        self._closed_at = inf
        """When this end learns that the other one has closed."""
        self._is_closed = False
        self._last_arrival = 0.0
        self._reader: tuple[Task, int] | None = None
        process.on_end.append(self.close)
        network.open.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def local_address(self) -> str:
        return self.process.host

    @property
    def peer_address(self) -> str:
        return self.peer.process.host

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises TransportError if this end knows that the other has gone."""
        world = self._network.world
        world.effect()
        if self._is_closed or self._closed_at <= world.now:
            raise TransportError("Broken pipe")
        at = max(self._network.open_at(self.process.host, self.peer.process.host), self._last_arrival)
        self._last_arrival = at
        self.peer.arrive(at, json.dumps(message))

    def arrive(self, at: float, text: str) -> None:
        """Receive, at a time, what the other end has sent."""
        if self.process.alive and self.process.host not in self._network.dead:
            self._arrived.append((at, text))
            self._wake(at)

    def _wake(self, at: float) -> None:
        if self._reader:
            world = self._network.world
            world.schedule(*self._reader, max(0.0, at - world.now))

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises TransportError if the other end has gone, TimeoutError if nothing comes."""
        world = self._network.world
        deadline = world.now + self._limits.timeout_seconds
        while True:
            if self._arrived and self._arrived[0][0] <= world.now:
                message: dict[str, Any] = json.loads(self._arrived.popleft()[1])
                return message
            if self._is_closed or (self._closed_at <= world.now and not self._arrived):
                raise TransportError("the other end has closed the connection")
            if world.now >= deadline:
                raise TimeoutError("the other end has sent nothing in time")
            task = world.task
            assert task is not None
            self._reader = (task, task.wake)
            first = min(deadline, self._closed_at, *(at for at, _ in self._arrived))
            world.wait(max(0.0, first - world.now))
            self._reader = None

    def close(self) -> None:
        """Close this end; the other one learns it, if the network lets it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._network.open.discard(self)
        if self.process.host in self._network.dead:
            return
        at = max(self._network.open_at(self.process.host, self.peer.process.host), self._last_arrival)
        self.peer.learn_of_close(at)

    def learn_of_close(self, at: float) -> None:
        """Learn, at a time, that the other end has closed."""
        self._closed_at = at
        self._wake(at)


class SimulatedServer:
    """Stands for hpc.base.transport.Server."""

    def __init__(
        self, network: Network, serve: Callable[[Any], None], limits: Limits, ports: Sequence[int] = ()
    ) -> None:
        self.process, self.limits = network.world.process, limits
        self._serve = serve
        self._defect: Exception | None = None
        self.port = ports[0] if ports else network.free_port()
        network.listen(self)

    def check(self) -> None:
        defect, self._defect = self._defect, None
        if defect:
            raise defect

    def close(self) -> None:
        """Stop listening. The process ends soon."""

    def converse(self, connection: SimulatedConnection) -> None:
        """Serve a connection, as `Server._converse`."""
        try:
            self._serve(connection)
        except DecodeError:
            raise  # a defect: both ends are of the same version
        except OSError:
            pass
        except Exception as error:  # noqa: BLE001 - `check` raises it
            self._defect = error
        finally:
            connection.close()
