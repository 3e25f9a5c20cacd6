"""The private directories on a node: one for each user in /dev/shm or /tmp and, in it, one for each of the user's runs.

A run's directory is in /dev/shm if possible, and in /tmp if not. It outlives the processes that write to it, but in
/dev/shm it is lost with the node. The node agent makes, locks and removes the directory; the ranks write to it.
Runs on compute nodes.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import DEV_SHM, UNSUPPORTED
from hpc.run.ownership import who_may_rename
from hpc.run.rundir import RunDir, SubPath

# The preferred parent directory comes first. /tmp may be on a disk, where only snapshots take longer.
_PARENTS = DEV_SHM, Path("/tmp")  # noqa: S108
_OTHERWISE = "ask an administrator to fix it"
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
# The wait for the lock is long, because the agent of the previous attempt may not have exited yet.
_LOCK_TIMEOUT_SECONDS, _POLL_SECONDS = 30.0, 0.2
# The wait for the removal of other runs' directories is short, because the storage of such a run may hang.
_REMOVE_SECONDS = 5.0


class NoLocksError(TorchrelayError):
    """The file system has no locks."""


def private_directory(parent: Path, otherwise: str = "use another --stage-dir") -> Path:
    """Return this user's private directory in a directory such as /tmp; make it if it does not exist.

    Its name is `torchrelay-<uid>`. If another user has taken this name, a number follows: the lowest that is free.
    `otherwise` is the advice in the error if the directory is refused.

    Raises:
        TorchrelayError: another user can replace the directory, or others can read it or write to it.
    """
    _check_path(parent.absolute(), otherwise)
    usual = f"torchrelay-{os.getuid()}"
    used = (path.name.removeprefix(f"{usual}-") for path in parent.glob(f"{usual}-*"))
    numbers = sorted(int(number) for number in used if number.isdecimal())
    # A name that was taken may be free again, but this user's other processes use the directory that they have made.
    made = (name for name in (usual, *(f"{usual}-{number}" for number in numbers)) if _is_own(parent / name))
    names = itertools.chain(made, [usual], (f"{usual}-{number}" for number in itertools.count(1)))
    return next(parent / name for name in names if _make(parent / name, otherwise))


def _is_own(path: Path) -> bool:
    return os.path.lexists(path) and path.lstat().st_uid == os.getuid()


def _make(directory: Path, otherwise: str) -> bool:
    """Make a directory unless it exists. Returns False if it belongs to another user.

    Raises TorchrelayError if it is this user's, but others may use it.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not _is_own(directory):
        return False
    mode = directory.lstat().st_mode
    if not stat.S_ISDIR(mode) or mode & 0o077:
        raise TorchrelayError(
            f"{directory} is {stat.filemode(mode)}, not a directory that only you can use: remove it, or {otherwise}"
        )
    return True


def check_stage_dir(directory: str) -> str:
    """Return --stage-dir as an absolute path, or unchanged if it begins with a variable, which only the nodes know."""
    if "$" in _VARIABLE.sub("", directory):
        raise UserError(f"--stage-dir is {directory!r}: write variables as $NAME or ${{NAME}}")
    return directory if directory.startswith("$") else str(Path(directory).absolute())


def stage_dir_on_node(directory: str, environment: Mapping[str, str]) -> Path:
    """Return --stage-dir on this node, with the values of the job's variables.

    Raises:
        TorchrelayError: the job has no such variable, or there is no such directory.
    """
    host, names = os.uname().nodename, [plain or braced for plain, braced in _VARIABLE.findall(directory)]
    if missing := next((name for name in names if not environment.get(name)), None):
        raise TorchrelayError(
            f"--stage-dir is {directory}, but the job has no variable {missing} on {host}: type srun env to see which "
            "it has, and submit with another --stage-dir"
        )
    path = Path(_VARIABLE.sub(lambda name: environment[name[1] or name[2]], directory))
    if not path.is_absolute() or not path.is_dir():
        means = f", which is {path}" if names else ""
        raise TorchrelayError(
            f"--stage-dir is {directory}{means}, but {host} has no such directory: submit with another --stage-dir"
        )
    return path


def _check_path(path: Path, otherwise: str) -> None:
    """Raise TorchrelayError if another user could replace a directory of the path."""
    for part in (*reversed(path.parents), path):
        if problem := who_may_rename(part):
            raise TorchrelayError(f"{problem}: {otherwise}")
        if part.is_symlink():
            _check_path(Path(os.path.normpath(part.parent / part.readlink())), otherwise)


def open_lock(path: Path) -> int:
    """Open a lock file and return its descriptor. Does not take the lock."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take an exclusive or shared lock; return False if another process holds it. A killed process releases its lock.

    Raises:
        NoLocksError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - for people
        raise NoLocksError(f"{path} cannot be locked: its file system has no locks (flock)") from error
    return True


@dataclass(frozen=True)
class NodeDir:
    """The files of one run on one node, by name."""

    path: Path

    snapshots = SubPath("snapshots")
    """The newest snapshots; each is a directory like a checkpoint."""
    exits = SubPath("exits")
    """Files about the processes of the ranks, such as one for each rank that failed."""
    stopping = SubPath("exits/stopping")
    """A file that exists once a user's script was asked to stop. No end of its ranks then counts as a failure."""
    compiled = SubPath("compiled")
    """The code that torch.compile has made."""
    lock = SubPath("lock")
    """The lock that the run's agent on this node holds."""
    run = SubPath("run")
    """A link to the run directory."""

    def heartbeat(self, local_rank: int) -> Path:
        """Return the file to which one rank writes its newest progress for the node agent."""
        return self.path / "heartbeats" / f"local-{local_rank}"

    def running_ranks(self) -> Iterator[Path]:
        """Yield the files of process wrappers that run or were killed. One that ends by itself removes its file.

        A wrapper's first child is its rank; its other children are processes that the rank has left.
        """
        return self.exits.glob("running-*.json")

    @property
    def directories(self) -> tuple[Path, ...]:
        """The run's directory and its subdirectories, in the order in which to make them."""
        return self.path, self.snapshots, self.exits, self.heartbeat(0).parent

    def is_needed(self) -> bool:
        """Return whether the run may continue from a snapshot in this directory, newer than the newest checkpoint.

        Such a snapshot is left over if the agent was killed before it could save the snapshot, or if the disk was full.
        """
        try:
            run = RunDir(self.run.readlink())
        except OSError:
            return False
        if _key(run.path) != self.path.name.rpartition("-")[0] or run.final_result.exists():
            return False
        # Ranks import this module in the environment of a user's script, which lacks packages that the history needs.
        from hpc.run.events.history import History  # noqa: PLC0415

        if History.load(run).is_cancelled_for_good:
            return False
        return _newest_step(self.snapshots) > _newest_step(run.checkpoints)


class HeldNodeDir:
    """A run's directory on this node, which this process has made or taken over, and locks until `close`."""

    def __init__(self, run: Path, node_rank: int) -> None:
        """Make and lock the directory, or take over the one of the run's previous attempt.

        To free memory, remove the directories of this user's other runs that no process has locked and no run needs.
        `node_rank` distinguishes the simulated nodes of one machine.

        Raises:
            TorchrelayError: no directory can be used, or another agent of this run is on this node.
        """
        self._run = run
        name, problems = f"{_key(run)}-{node_rank}", list[str]()
        for parent in _PARENTS:
            try:
                root = private_directory(parent, _OTHERWISE)
                self.files = NodeDir(root / name)
                remover = threading.Thread(target=_remove_abandoned, args=(root, self.files), daemon=True)
                remover.start()
                remover.join(_REMOVE_SECONDS)
                lock = self._wait_for_lock()
            except (TorchrelayError, OSError) as error:
                problems.append(str(error))
                continue
            if lock is None:
                raise TorchrelayError(f"{self.files.path} is in use: another agent of this run is on this node")
            self._lock, self.problem = lock, "; ".join(problems)
            """The reason why the directory is not in /dev/shm; empty if it is."""
            return
        raise TorchrelayError("; ".join(problems))

    def _wait_for_lock(self) -> int | None:
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while (lock := self._make_and_lock()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return lock

    def _make_and_lock(self) -> int | None:
        """Make the directory and return its lock; None if another agent holds the lock or has removed the directory."""
        if not _make(root := self.files.path.parent, _OTHERWISE):
            raise TorchrelayError(f"{root} was removed, and another user has made it")
        try:
            for directory in self.files.directories:
                directory.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.files.run.symlink_to(self._run)
            descriptor = open_lock(self.files.lock)
        except FileNotFoundError:
            return None
        if try_lock(descriptor) and self._is_whole(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def _is_whole(self, lock: int) -> bool:
        """Return whether nothing was removed or replaced since this process took the lock."""
        try:
            same = os.path.samestat(self.files.lock.stat(), os.fstat(lock))
        except FileNotFoundError:
            return False
        return same and all(directory.is_dir() for directory in self.files.directories)

    def restore(self) -> bool:
        """Make the directory again if parts of it were removed, and return whether any were.

        systemd (RemoveIPC=yes, at the user's logout) and some clusters' epilogs empty /dev/shm under a running job.

        Raises:
            TorchrelayError: another process has made the directory.
            OSError: the directory cannot be made.
        """
        if self._is_whole(self._lock):
            return False
        os.close(self._lock)
        lock = self._wait_for_lock()
        if lock is None:
            raise TorchrelayError(f"{self.files.path} was removed, and another process has created it again")
        self._lock = lock
        return True

    def close(self, *, remove: bool) -> None:
        """Release the lock. If `remove` is True, remove the directory first."""
        if remove:
            shutil.rmtree(self.files.path, ignore_errors=True)
        os.close(self._lock)


def _key(run: Path) -> str:
    """Return a digest that identifies a run. Its path alone does not: a new run may have replaced a deleted run."""
    digest = hashlib.sha256(os.fsencode(run))
    spec = RunDir(run).spec
    if spec.exists():
        digest.update(spec.read_bytes() + str(spec.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def _newest_step(directory: Path) -> int:
    paths = (*directory.glob("step-*"), *directory.glob("shard-*/step-*"))
    steps = (path.name.removeprefix("step-") for path in paths)
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def node_dirs(run: Path) -> list[NodeDir]:
    """Return a run's directories on this machine: one, or one for each simulated node."""
    locks = list[Path]()
    for parent in _PARENTS:
        with contextlib.suppress(TorchrelayError, OSError):
            locks += sorted(private_directory(parent).glob(f"{_key(run)}-*/lock"))
    return [NodeDir(lock.parent) for lock in locks]


def _remove_abandoned(root: Path, own: NodeDir) -> None:
    for directory in root.iterdir():
        other = NodeDir(directory)
        # Staged data are in the same directory if the node has no /dev/shm; they have no such lock.
        if directory.name.startswith(own.path.name.rpartition("-")[0]) or not other.lock.exists():
            continue
        try:
            descriptor = open_lock(other.lock)
        except FileNotFoundError:
            continue  # another agent has just removed it
        # If the storage of the other run does not answer, its directory on this node stays.
        with contextlib.suppress(OSError, NoLocksError):
            if try_lock(descriptor) and not other.is_needed():
                shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)
