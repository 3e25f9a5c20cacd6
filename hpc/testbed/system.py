"""Running the system's commands, waiting, and the testbed's lock. Runs as root on the testbed's machine."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpc.core.errors import TorchrelayError, UserError

# Daemons and what they start get this environment and nothing of the caller's: a virtual environment or an outer
# job's SLURM_* would turn up in every job of the testbed.
CLEAN_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

BINARIES_OF_PACKAGE = {
    "slurm-wlm": ("slurmctld", "slurmd", "scontrol", "sinfo"),
    "munge": ("munged", "munge"),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter", "setsid"),
}
ACCOUNTING_BINARIES_OF_PACKAGE = {
    "slurmdbd": ("slurmdbd",),
    "mariadb-server": ("mariadbd", "mariadb-install-db", "mariadb-admin"),
}


def find(binary: str) -> str | None:
    """The path of a binary, in the directories that the daemons see."""
    return shutil.which(binary, path=CLEAN_ENVIRONMENT["PATH"])


def require_root() -> None:
    """Refuse to go on as an ordinary user: namespaces and interfaces are root's."""
    if os.geteuid() != 0:
        raise UserError(f"the testbed needs root, and this is uid {os.geteuid()}; type: sudo python -m hpc.testbed ...")


def require_packages(*, accounting: bool) -> None:
    """Refuse to go on without the packages, with the command that installs them."""
    packages = BINARIES_OF_PACKAGE | (ACCOUNTING_BINARIES_OF_PACKAGE if accounting else {})
    missing = [package for package, binaries in packages.items() if not all(map(find, binaries))]
    if missing:
        names = " ".join(missing)
        raise UserError(f"the testbed needs what is not installed: {names}; type: apt-get install -y {names}")


def run(*command: str | Path, timeout_seconds: float = 30, **environment: str) -> str:
    """Run a command in the clean environment and return what it printed.

    Raises:
        TorchrelayError: it failed or took too long; the message has the last line that it said.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            check=False,
            env=CLEAN_ENVIRONMENT | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except FileNotFoundError as error:
        raise TorchrelayError(f"`{words[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise TorchrelayError(f"`{' '.join(words)}` gave no answer in {timeout_seconds:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise TorchrelayError(f"`{' '.join(words)}` failed with exit code {done.returncode}: {said[-1]}")
    return done.stdout


def start(*command: str | Path, log: Path, **environment: str) -> None:
    """Start a program that turns itself into a daemon, or that `setsid --fork` turns into one; wait for that alone.

    Its output goes to the log and its input is empty: a caller whose output is a pipe must not wait for the daemons.

    Raises:
        TorchrelayError: it did not start; the message has the last line of its log.
    """
    words = [str(word) for word in command]
    with log.open("ab") as output:
        done = subprocess.run(
            words,
            check=False,
            env=CLEAN_ENVIRONMENT | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            umask=0o022,
            start_new_session=True,
            timeout=60,
        )
    if done.returncode != 0:
        said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise TorchrelayError(f"`{' '.join(words)}` failed with exit code {done.returncode}: {said[-1]} (log: {log})")


def succeeds(*command: str | Path, timeout_seconds: float = 10, **environment: str) -> bool:
    """Whether a probing command succeeds in time."""
    try:
        run(*command, timeout_seconds=timeout_seconds, **environment)
    except TorchrelayError:
        return False
    return True


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Poll until the condition holds.

    Raises:
        TorchrelayError: it did not in time; `what` says what was waited for and where to look.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TorchrelayError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep everybody else from changing the testbed. The lock's file is gone afterwards.

    Who waited may hold the lock of a file that the holder before has removed: then it tries again with the new one.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_file_at(descriptor, path):
                try:
                    yield
                finally:
                    path.unlink()
                return
        finally:
            os.close(descriptor)


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
