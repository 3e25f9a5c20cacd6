"""Pinned namespaces: how the testbed knows its own processes. Runs as root on the testbed's machine.

Every process of the testbed is started in a namespace that was pinned to a file before: the nodes' in their network
namespaces, the login host's daemons in a host-name namespace. Whatever became of process id files, and whatever the
processes forked, a namespace tells whose they are, and nobody else's are touched.
"""

import contextlib
import os
import signal
from pathlib import Path

from hpc.core.errors import UserError
from hpc.testbed.system import run, wait_until


def pin(path: Path, *command: str) -> None:
    """Create a namespace that lasts, of the kind that the path's suffix names; `command` runs in it once."""
    path.touch()
    run("unshare", f"--{path.suffix[1:]}={path}", *(command or ("true",)))


def inside(path: Path) -> tuple[str, ...]:
    """The words before a command that make it run in a pinned namespace."""
    return ("nsenter", f"--{path.suffix[1:]}={path}", "--")


def inside_fresh(path: Path, *kinds: str) -> tuple[str, ...]:
    """As `inside`, with new namespaces of these kinds in it.

    Mounts that the machine gets later appear in there, such as an automounted home; those made in there stay inside.
    """
    options = (f"--{kind}" for kind in kinds)
    return (*inside(path), "unshare", *options, "--propagation=slave", "--")


def unpin(path: Path) -> None:
    """Let go of a namespace: it ends with its last process. No error if there is none."""
    if not path.exists():
        return
    # An interrupted `up` may have left a plain file, with no namespace mounted on it.
    if path.stat().st_dev != path.parent.stat().st_dev:
        run("umount", "--no-mtab", path)
    path.unlink()


def processes(path: Path) -> list[int]:
    """The ids of all processes in a pinned namespace; none if it does not exist."""
    try:
        pinned = path.stat()
    except FileNotFoundError:
        return []
    link = f"ns/{path.suffix[1:]}"
    found = []
    for entry in Path("/proc").iterdir():
        # A process that ends while we look, or a zombie, has no namespace any more.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.path.samestat(pinned, (entry / link).stat()):
                found.append(int(entry.name))
    return found


def kill_all(path: Path) -> None:
    """SIGKILL every process in a pinned namespace, again and again until none is left.

    Raises:
        UserError: this very process lives in there.
        TorchrelayError: some did not die.
    """
    if os.getpid() in processes(path):
        raise UserError(f"this shell is inside the testbed ({path.name}); type the command outside of its nodes")

    def none_left() -> bool:
        left = processes(path)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(none_left, seconds=20, what=f"for the killed processes in {path} to end")
