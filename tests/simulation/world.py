"""The clock and the processes of the simulated world.

All code runs in one thread. Each thread of a simulated process is a greenlet; it runs until it waits, and the greenlet
whose time has come next then continues. So a seed decides in which order everything happens.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any, ClassVar

from greenlet import GreenletExit, getcurrent, greenlet

EPOCH = 1_000_000_000.0
"""When the simulation begins, in seconds since the epoch: years before the files that it writes."""
# How often another process may continue between two effects of a process, and for how long.
_EFFECT_PAUSES, _MEAN_PAUSE_SECONDS = 0.15, 0.02
# A machine wakes a process a little later than it asked for.
_MEAN_OVERSLEEP_SECONDS = 0.005


@dataclass(eq=False)
class Process:
    """A process on a host."""

    world: "World"
    host: str
    name: str
    pid: int
    alive: bool = True
    exit_code: int | None = None
    """None while it runs."""
    suspended_until: float = 0.0
    handle: Callable[[int], None] | None = None
    """Receives the number of a signal."""
    doomed_in: int | None = None
    """The process is killed before this number of further effects."""
    on_end: list[Callable[[], None]] = field(default_factory=list)

    def end(self, exit_code: int) -> None:
        """End the process, with all its threads. Ending it twice has no effect."""
        if not self.alive:
            return
        self.alive, self.exit_code = False, exit_code
        for act in self.on_end:
            act()


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, run: Callable[[], None]) -> None:
        self.process, self.done = process, False
        self.wake = 0
        """Counts the waits: a wake-up for an earlier one comes too late."""
        self.greenlet = greenlet(lambda: self._run(run), process.world.hub)
        self.waiters = list[tuple["Task", int]]()

    def _run(self, run: Callable[[], None]) -> None:
        world = self.process.world
        try:
            run()
        except GreenletExit:
            raise
        except BaseException as error:  # noqa: BLE001 - a defect of the code that is tested, or of the simulation
            world.defect(self, error)
        self.done = True
        for task, wake in self.waiters:
            world.schedule(task, wake, 0.0)


class World:
    """The simulated time, and what waits for it."""

    current: ClassVar["World | None"] = None
    storage: Any = None
    """The shared storage (simulation.storage); None in a world that has none."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.defects = list[str]()
        self.timeline = list[str]()
        self.ended = False
        self.processes = list[Process]()
        self.clock_offsets = dict[str, float]()
        """How far the clock of a host is ahead, in seconds."""
        self.task: Task | None = None
        """The one that runs."""
        self.hub = getcurrent()
        self._queue: list[tuple[float, float, int, Task, int]] = []
        self._tasks = list[Task]()
        self._pids, self._count = 1000, 0

    # --- for the world ---

    def start(self, host: str, name: str, run: Callable[[], int]) -> Process:
        """Start a process. It ends with what `run` returns."""
        self._pids += 1
        process = Process(self, host, name, self._pids)
        self.processes.append(process)
        self.spawn(process, lambda: process.end(run()))
        return process

    def spawn(self, process: Process, run: Callable[[], None]) -> Task:
        """Start a thread of a process."""
        task = Task(process, run)
        self._tasks.append(task)
        self.schedule(task, 0, 0.0)
        return task

    def schedule(self, task: Task, wake: int, seconds: float) -> None:
        """Continue a task after some seconds, unless it has continued meanwhile."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self.random.random(), self._count, task, wake))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let the world go on for some seconds, or until something holds."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end and not until():
            at, _, _, task, wake = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            process = task.process
            if task.wake != wake or task.done or not process.alive:
                continue
            if process.suspended_until > self.now:
                self.schedule(task, wake, process.suspended_until - self.now)
                continue
            self._continue(task)
        if not until():
            self.now = max(self.now, end)

    def _continue(self, task: Task) -> None:
        task.wake += 1
        self.task = task
        task.greenlet.switch()
        self.task = None

    def close(self) -> None:
        """End the world: no code that waits in it continues."""
        self.ended = True
        for task in self._tasks:
            if task.greenlet and not task.greenlet.dead:
                task.greenlet.throw(GreenletExit)

    def tell(self, text: str) -> None:
        """Add a line to the timeline."""
        self.timeline.append(f"{self.now:9.2f}  {text}")

    def defect(self, task: Task, error: BaseException) -> None:
        """Note an exception that no code handled."""
        import traceback

        frames = "".join(traceback.format_exception(error))
        self.defects.append(f"{task.process.name} on {task.process.host}: {frames}")
        self.tell(f"{task.process.name} on {task.process.host} has raised {error!r}")

    # --- for the code in it ---

    def wait(self, seconds: float | None) -> None:
        """Let others go on, for some seconds, or until this task is scheduled."""
        task = self.running()
        if seconds is not None:
            oversleep = self.random.expovariate(1 / _MEAN_OVERSLEEP_SECONDS)
            self.schedule(task, task.wake, max(0.0, seconds) + oversleep)
        self.hub.switch()
        if self.ended:
            raise GreenletExit

    def effect(self) -> None:
        """Mark an effect of the running process: before it, others may go on, and the process may be killed."""
        if self.task is None or self.ended:
            return
        process = self.task.process
        if process.doomed_in is not None:
            process.doomed_in -= 1
            if process.doomed_in <= 0:
                self.tell(f"{process.name} on {process.host} is killed between two effects")
                process.end(137)
        if not process.alive:
            self.wait(None)
        if self.random.random() < _EFFECT_PAUSES:
            self.wait(self.random.expovariate(1 / _MEAN_PAUSE_SECONDS))

    def running(self) -> Task:
        """Return the task that runs."""
        if self.ended:
            raise GreenletExit
        assert self.task is not None, "only the code of a simulated process waits"
        return self.task

    @property
    def process(self) -> Process:
        """The process whose code runs."""
        return self.running().process


def _running() -> tuple[World, Task]:
    """Return the present world, and the task that runs."""
    assert World.current is not None
    return World.current, World.current.running()


class StandIn:
    """Stands for a module. What a subclass does not define is the module's own."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Event:
    """Stands for threading.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters = list[tuple[Task, int]]()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for task, wake in waiters:
            task.process.world.schedule(task, wake, 0.0)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            world, task = _running()
            self._waiters.append((task, task.wake))
            world.wait(timeout)
        return self._is_set


class Thread:
    """Stands for threading.Thread."""

    def __init__(
        self, target: Callable[..., Any] | None = None, args: tuple[Any, ...] = (), *, daemon: bool = True,
        name: str = "thread",
    ) -> None:  # fmt: skip
        del daemon, name  # all threads end with their process
        self._target, self._args = target, args
        self._task: Task | None = None

    def start(self) -> None:
        target = self._target
        if target:
            world, task = _running()
            self._task = world.spawn(task.process, lambda: target(*self._args))

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        if self._task and not self._task.done:
            world, task = _running()
            self._task.waiters.append((task, task.wake))
            world.wait(timeout)
