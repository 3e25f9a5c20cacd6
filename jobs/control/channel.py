"""How the agents of an attempt hear of each other: a connection from each to the head node's agent.

Runs on compute nodes. Every agent sends its report twice a second, and gets the orders back. Slurm notices a dead node
after minutes, and files on shared storage are seen after a minute at worst; this takes seconds. Who does not know the
attempt's nonce, which stands in the run directory, is not heard.
"""

import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

from hpc.core.files import json_line
from jobs.control.messages import Directive, NodeStatus, Phase

# Five seconds of silence are a dead node; a busy machine or a switch that reboots a port may be silent for two.
LOST_SECONDS = 5.0
_BEAT_SECONDS = 0.5
# While a node stages, the others wait for its word, and it for the head's.
_STARTING_BEAT_SECONDS = 0.1
_PATIENCE_SECONDS = 2.0
# A connection that ended says more than silence: who was only interrupted is back within this.
_ENDED_SECONDS = 1.5
_LONGEST_LINE = 2**20
# An agent that did not run for so long, because its job or its machine was suspended, could not listen either.
_TICK_SECONDS, _AWAY_SECONDS = 0.1, 2.0


class _Clock:
    """When somebody was last heard of, by one who listens all the time."""

    def __init__(self) -> None:
        self._heard = self._listened = time.monotonic()

    def tick(self) -> None:
        """The listener runs."""
        before, self._listened = self._listened, time.monotonic()
        if self._listened - before > _AWAY_SECONDS:
            self._heard = self._listened

    def heard(self) -> None:
        self._heard = time.monotonic()

    def ended(self) -> None:
        """The connection has ended, or nobody listens at the other end any more."""
        self._heard = min(self._heard, time.monotonic() - (LOST_SECONDS - _ENDED_SECONDS))

    @property
    def silent_seconds(self) -> float:
        return max(0.0, self._listened - self._heard)


def _keep_ticking(clocks: Callable[[], Iterable[_Clock]]) -> None:
    while True:
        time.sleep(_TICK_SECONDS)
        for clock in clocks():
            clock.tick()


def _start(target: Callable[..., None], name: str, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True, name=name)
    thread.start()
    return thread


class ControlServer:
    """The head node's end: everybody's last report, and the orders for all."""

    def __init__(self, nonce: str, port: int = 0) -> None:
        """Listen.

        Args:
            nonce: what an agent of this attempt knows.
            port: where to; by default the kernel chooses.
        """
        self.orders = Directive()
        """Assigned as a whole, so that no lock is needed."""
        self._nonce = nonce
        self._reports: dict[int, NodeStatus] = {}
        self._clocks: dict[int, _Clock] = {}
        self._server = _Server(("", port), _Conversation)
        self._server.hub = self
        _start(self._server.serve_forever, "hub")
        _start(_keep_ticking, "hub-clocks", lambda: list(self._clocks.values()))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def tell(self, report: NodeStatus) -> None:
        """Take a report: the head's own, or one that came in."""
        self._reports[report.node_rank] = report
        self._clocks.setdefault(report.node_rank, _Clock()).heard()

    def reports(self) -> dict[int, NodeStatus]:
        """By node rank; none yet of nodes that have never been heard of."""
        return dict(self._reports)

    def silent_seconds(self, node_rank: int) -> float | None:
        """How long a node has said nothing; None if it never has said anything."""
        clock = self._clocks.get(node_rank)
        return None if clock is None else clock.silent_seconds

    def answer(self, line: bytes) -> tuple[int, bytes]:
        """The node rank that a line came from, and the answer to it.

        Raises:
            ValueError, KeyError, TypeError: it is not from an agent of this attempt.
        """
        message: dict[str, Any] = json.loads(line)
        if not hmac.compare_digest(str(message["nonce"]), self._nonce):
            raise ValueError("nonce")
        report = NodeStatus.read(message["report"])
        self.tell(report)
        return report.node_rank, json_line({"time": time.time(), "orders": asdict(self.orders)}).encode()

    def ended(self, node_rank: int) -> None:
        """A node's connection has ended."""
        self._clocks[node_rank].ended()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024  # all agents of a large job connect at once
    allow_reuse_address = True
    hub: ControlServer


class _Conversation(StreamRequestHandler):
    timeout = LOST_SECONDS * 2

    def handle(self) -> None:
        assert isinstance(self.server, _Server)  # noqa: S101 - for the type checker
        hub, node_rank = self.server.hub, None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            while line := self.rfile.readline(_LONGEST_LINE):
                node_rank, answer = hub.answer(line)
                self.wfile.write(answer)
        if node_rank is not None:
            hub.ended(node_rank)


class ControlClient:
    """Another node's end: it tells the head its report, and knows its orders."""

    def __init__(self, host: str, port: int, nonce: str, report: NodeStatus) -> None:
        self.orders = Directive()
        self.skew_seconds: float | None = None
        """The head's clock minus ours, as of the first answer."""
        self._answered = threading.Event()
        self._address, self._nonce, self._report = (host, port), nonce, report
        self._clock, self._changed, self._closed = _Clock(), threading.Event(), threading.Event()
        self._thread = _start(self._talk, "link")
        _start(_keep_ticking, "link-clock", lambda: (self._clock,))

    def tell(self, report: NodeStatus) -> None:
        """Send this report from now on; now, if it says that this node does or has something else."""
        before = self._report
        news = (report.phase, report.round, report.standings) != (before.phase, before.round, before.standings)
        self._report = report
        if news:
            self._changed.set()

    @property
    def silent_seconds(self) -> float:
        """How long the head has said nothing."""
        return self._clock.silent_seconds

    def meet(self, timeout_seconds: float) -> float | None:
        """Wait for the head's first answer; the head's clock minus ours, None if there is none."""
        self._answered.wait(timeout_seconds)
        return self.skew_seconds

    @property
    def has_met(self) -> bool:
        """Whether the head has ever answered."""
        return self._answered.is_set()

    def close(self) -> None:
        """Send the last report once more, and stop."""
        self._closed.set()
        self._changed.set()
        self._thread.join(_PATIENCE_SECONDS * 2)

    def _talk(self) -> None:
        while not self._closed.is_set():
            try:
                with self._connected() as connection:
                    self._converse(connection)
            except ConnectionError:
                self._clock.ended()
            except (OSError, ValueError, KeyError, TypeError):
                pass  # no answer: the silence is counted
            self._closed.wait(_BEAT_SECONDS)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(self._address, _PATIENCE_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection

    def _converse(self, connection: socket.socket) -> None:
        """NodeStatus and listen, until it fails or the link is closed."""
        answers = connection.makefile("rb")
        while True:
            closing = self._closed.is_set()
            self._changed.clear()
            asked = time.time()
            connection.sendall(json_line({"nonce": self._nonce, "report": asdict(self._report)}).encode())
            line = answers.readline(_LONGEST_LINE)
            if not line:
                raise ConnectionResetError
            self._hear(json.loads(line), (asked + time.time()) / 2)
            if closing:
                return
            starting = self._report.phase is Phase.STARTING
            self._changed.wait(_STARTING_BEAT_SECONDS if starting else _BEAT_SECONDS)

    def _hear(self, answer: dict[str, Any], asked: float) -> None:
        self._clock.heard()
        self.orders = Directive.read(answer["orders"])
        if self.skew_seconds is None:
            self.skew_seconds = answer["time"] - asked
            self._answered.set()
