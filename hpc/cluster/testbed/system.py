"""Runs commands, waits for conditions, and holds the testbed's lock. Runs as root on the testbed's machine."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpc.base.errors import TorchrelayError, UserError

# The daemons get only this environment: the caller's virtual environment, or an outer job's SLURM_*, would appear in
# every job of the testbed.
_CLEAN_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

_BINARIES_OF_PACKAGE = {
    "slurm-wlm": ("slurmctld", "slurmd", "scontrol", "sinfo"),
    "munge": ("munged", "munge"),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter", "setsid"),
}
_ACCOUNTING_BINARIES_OF_PACKAGE = {
    "slurmdbd": ("slurmdbd",),
    "mariadb-server": ("mariadbd", "mariadb-install-db", "mariadb-admin"),
}


def require_root() -> None:
    """Raise UserError for an ordinary user: namespaces and network interfaces need root."""
    if os.geteuid() != 0:
        raise UserError(f"the testbed needs root, and you are uid {os.geteuid()}; type: sudo python -m hpc.testbed ...")


def require_packages(*, accounting: bool) -> None:
    """Raise UserError if packages are missing; the message has the command that installs them."""
    packages = _BINARIES_OF_PACKAGE | (_ACCOUNTING_BINARIES_OF_PACKAGE if accounting else {})
    path = _CLEAN_ENVIRONMENT["PATH"]
    missing = [name for name, binaries in packages.items() if not all(shutil.which(b, path=path) for b in binaries)]
    if missing:
        names = " ".join(missing)
        raise UserError(f"the testbed needs packages that are not installed: {names}; type: apt-get install -y {names}")


def run(*command: str | Path, timeout_seconds: float = 30, **environment: str) -> str:
    """Run a command in the clean environment and return its stdout.

    Raises:
        TorchrelayError: the command is missing, took too long, or failed; the message then has its last line of output.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            check=False,
            env=_CLEAN_ENVIRONMENT | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except FileNotFoundError as error:
        raise TorchrelayError(f"`{words[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise TorchrelayError(f"`{' '.join(words)}` did not end within {timeout_seconds:g} s") from error
    if done.returncode != 0:
        raise _failure(words, done.returncode, done.stderr or done.stdout)
    return done.stdout


def start(*command: str | Path, log: Path, **environment: str) -> None:
    """Start a program that becomes a daemon, by itself or with `setsid --fork`, and wait until it has become one.

    Its output goes to the log, and its input is empty, so that a caller's pipe does not stay open until daemons end.

    Raises:
        TorchrelayError: the program failed to start; the message has the last line of the log.
    """
    words = [str(word) for word in command]
    with log.open("ab") as output:
        done = subprocess.run(
            words,
            check=False,
            env=_CLEAN_ENVIRONMENT | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            umask=0o022,
            start_new_session=True,
            timeout=60,
        )
    if done.returncode != 0:
        raise _failure(words, done.returncode, log.read_text(errors="replace"), f" (log: {log})")


def _failure(words: list[str], exit_code: int, output: str, hint: str = "") -> TorchrelayError:
    last = (output.strip().splitlines() or ["no output"])[-1]
    return TorchrelayError(f"`{' '.join(words)}` failed with exit code {exit_code}: {last}{hint}")


def succeeds(*command: str | Path, **environment: str) -> bool:
    """Return whether a command succeeds within 10 s."""
    try:
        run(*command, timeout_seconds=10, **environment)
    except TorchrelayError:
        return False
    return True


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Poll until the condition holds.

    Raises:
        TorchrelayError: the condition did not hold in time. `what` completes the message "waited in vain for".
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TorchrelayError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the testbed's lock, and remove its file afterwards.

    A process that waited may get the lock of a file that the previous holder has removed. It then locks the new file.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(descriptor), path.stat())
            except FileNotFoundError:
                is_current = False
            if is_current:
                try:
                    yield
                finally:
                    path.unlink()
                return
        finally:
            os.close(descriptor)
