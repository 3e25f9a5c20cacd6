"""The shared storage of the simulated hosts: files in memory (tmpfs), seen through the delays and errors of NFS.

A host remembers for up to a minute that a name does not exist, until it opens the directory. Requests may fail, wait,
or be carried out although they report an error.
"""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import Any

from simulation.world import EPOCH, StandIn, World

_NAME_CACHE_SECONDS = 45.0


@dataclass
class Storage:
    """The state of the storage, and what goes wrong with it."""

    world: World
    root: str
    full_until: float = 0.0
    """No request finds space before this time."""
    failing_until: dict[str, float] = field(default_factory=dict)
    """Until when requests of a host fail with EIO."""
    slow_until: dict[str, float] = field(default_factory=dict)
    """Until when requests of a host wait."""
    lost_replies: int = 0
    """This number of links are made, and reported as failed."""
    missing: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a host learned that a name does not exist."""
    looked: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a host last opened a directory."""

    def has(self, path: object) -> bool:
        """Return whether a path is on this storage."""
        return str(path).startswith(self.root)

    def request(self, path: object, *, writes: bool = False) -> None:
        """Send a request of the running process. Raises OSError if it fails."""
        if not self.has(path) or self.world.ended or self.world.task is None:
            return
        self.world.effect()
        host = self.world.process.host
        while (until := self.slow_until.get(host, 0.0)) > self.world.now:
            self.world.wait(until - self.world.now)
        if self.failing_until.get(host, 0.0) > self.world.now:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if writes and self.full_until > self.world.now:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def create(self, path: object) -> None:
        """Note that the running process has created a name."""
        if self.has(path) and self.world.task is not None:
            self.missing.pop((self.world.process.host, str(path)), None)

    def look(self, directory: object) -> None:
        """Note that the running process has opened a directory."""
        if self.has(directory) and self.world.task is not None:
            self.looked[self.world.process.host, str(directory)] = self.world.now

    def hides(self, path: object) -> bool:
        """Return whether the host of the running process remembers that a name does not exist, although it does."""
        if self.world.task is None or self.world.ended or not self.has(path):
            return False
        here, name = self.world.process.host, str(path)
        learned = self.missing.get((here, name))
        is_old = learned is None or self.world.now - learned > _NAME_CACHE_SECONDS
        if not is_old and self.looked.get((here, name.rpartition("/")[0]), -1.0) < self.missing[here, name]:
            return True
        self.missing.pop((here, name), None)
        if not os.path.lexists(name):
            self.missing[here, name] = self.world.now
        return False


def storage() -> Storage | None:
    """Return the storage of the present world."""
    return World.current.storage if World.current else None


class SimulatedPath(PosixPath):
    """Stands for pathlib.Path: its requests pass through the storage of the world."""

    def exists(self) -> bool:
        if here := storage():
            here.request(self)
            if here.hides(self):
                return False
        return super().exists()

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if here := storage():
            writes = any(letter in mode for letter in "wax+")
            here.request(self, writes=writes)
            if not writes and here.hides(self):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
            if writes and not super().exists():
                here.create(self)
        return super().open(mode, *args, **kwargs)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        """Set the file's time to that of the storage."""
        here = storage()
        if here:
            here.request(self)
        super().touch(mode, exist_ok)
        if here:
            now = EPOCH + here.world.now
            os.utime(self, (now, now))

    def replace(self, target: Any) -> Any:
        here = storage()
        if here:
            here.request(target, writes=True)
        done = super().replace(target)
        if here:
            here.create(target)
        return done

    rename = replace  # as the kernel does it


class SimulatedOs(StandIn):
    """Stands for the module os where the product writes files: its requests pass through the storage of the world."""

    def getpid(self) -> int:
        world = World.current
        return world.process.pid if world and world.task else os.getpid()

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if here := storage():
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            here.request(path, writes=writes)
            if flags & os.O_DIRECTORY:
                here.look(path)
            if flags & os.O_CREAT and not os.path.lexists(path):
                here.create(path)
        return os.open(path, flags, mode)

    def scandir(self, path: Any) -> Any:
        """List a directory, which shows what other hosts have created."""
        if here := storage():
            here.request(path)
            here.look(path)
        return os.scandir(path)

    def link(self, source: Any, target: Any) -> None:
        here = storage()
        if here:
            here.request(target, writes=True)
        os.link(source, target)
        if here:
            here.create(target)
            if here.lost_replies and here.has(target):
                here.lost_replies -= 1
                here.world.tell(f"the reply to the creation of {Path(target).name} is lost, and NFS sends it again")
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))

    def fsync(self, descriptor: int) -> None:
        """Files in memory need no flush."""

    def fstat(self, descriptor: int) -> Any:
        """Return a status with the time of the storage."""
        found = os.fstat(descriptor)
        world = World.current
        if world is None or found.st_mtime < EPOCH + 1e8:
            return found
        fields = list(found)
        fields[8] = int(EPOCH + world.now)
        return os.stat_result(fields, {"st_mtime": EPOCH + world.now})
