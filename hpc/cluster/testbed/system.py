"""Runs commands, waits for conditions, and holds the testbed's lock. Runs as root on the testbed's machine."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc.base.errors import TorchrelayError, UserError
from hpc.cluster.testbed.layout import SLURM_CONF

# The daemons get only this environment: the caller's virtual environment, or an outer job's SLURM_*, would appear in
# every job of the testbed.
_CLEAN_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

_BINARIES = ("slurmctld", "slurmd", "scontrol", "sinfo", "munged", "munge", "ip", "unshare", "nsenter", "setsid")
_PACKAGES = "slurm-wlm munge iproute2 util-linux"
_ACCOUNTING_BINARIES = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb-admin")
_ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"


def require_root() -> None:
    """Raise UserError for an ordinary user: namespaces and network interfaces need root."""
    if os.geteuid() != 0:
        raise UserError(f"the testbed needs root, and you are uid {os.geteuid()}; type: sudo python -m hpc.testbed ...")


def require_packages(*, accounting: bool) -> None:
    """Raise UserError if programs are missing; the message has the command that installs them."""
    binaries = _BINARIES + (_ACCOUNTING_BINARIES if accounting else ())
    missing = [name for name in binaries if not shutil.which(name, path=_CLEAN_ENVIRONMENT["PATH"])]
    if missing:
        packages = f"{_PACKAGES} {_ACCOUNTING_PACKAGES}" if accounting else _PACKAGES
        raise UserError(
            f"the testbed needs programs that are missing: {' '.join(missing)}; type: apt-get install -y {packages}"
        )


def run(*command: str | Path, timeout_seconds: float = 30) -> str:
    """Run a command in the clean environment, for the testbed's Slurm, and return its stdout.

    Raises:
        TorchrelayError: the command is missing, took too long, or failed; the message then has its last line of output.
    """
    done = _call(command, timeout_seconds, {"SLURM_CONF": str(SLURM_CONF)}, capture_output=True, text=True)
    if done.returncode != 0:
        raise _failure(done, done.stderr or done.stdout)
    return str(done.stdout)


def start(*command: str | Path, log: Path, **environment: str) -> None:
    """Start a program that becomes a daemon, by itself or with `setsid --fork`, and wait until it has become one.

    Its output goes to the log, and its input is empty, so that a caller's pipe does not stay open until daemons end.
    Raises TorchrelayError if the program failed to start; the message has the last line of the log.
    """
    with log.open("ab") as output:
        own = {"cwd": "/", "umask": 0o022, "start_new_session": True}
        done = _call(command, 60, environment, stdout=output, stderr=output, **own)
    if done.returncode != 0:
        raise _failure(done, log.read_text(errors="replace"), f" (log: {log})")


def _call(
    command: Sequence[str | Path], timeout_seconds: float, environment: dict[str, str], **options: Any
) -> "subprocess.CompletedProcess[Any]":
    words = [str(word) for word in command]
    try:
        return subprocess.run(
            words,
            check=False,
            env=_CLEAN_ENVIRONMENT | environment,
            stdin=subprocess.DEVNULL,
            timeout=timeout_seconds,
            **options,
        )
    except FileNotFoundError as error:
        raise TorchrelayError(f"`{words[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise TorchrelayError(f"`{' '.join(words)}` did not end within {timeout_seconds:g} s") from error


def _failure(done: "subprocess.CompletedProcess[Any]", output: str, hint: str = "") -> TorchrelayError:
    last = (output.strip().splitlines() or ["no output"])[-1]
    return TorchrelayError(f"`{' '.join(done.args)}` failed with exit code {done.returncode}: {last}{hint}")


def succeeds(*command: str | Path) -> bool:
    """Return whether a command succeeds within 10 s."""
    try:
        run(*command, timeout_seconds=10)
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
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory. Unlike the lock of a file, it leaves no file behind."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
