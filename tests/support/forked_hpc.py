"""Types `hpc ...` in a fork of a server that has imported it, which saves a third of a second of processor time.

It is a process like any other, with a directory, an environment, an exit code and signals of its own.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import hpc.__main__
from hpc.__main__ import VERBS, module_of

_MODULES = (
    *map(module_of, VERBS),
    *("hpc.studies.sweep_study", "rich.live", "rich.table", "submitit"),
)
_TIMEOUT_SECONDS = 240
_LONGEST_MESSAGE = 1 << 17


def can_fork(environment: dict[str, str]) -> bool:
    """Whether a fork sees this environment as a new process would: Python reads some variables before it imports."""
    return _read_early(environment) == _read_early(os.environ.copy())


def _read_early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("PYTHON", "LC_", "LANG"))}


def run_forked(
    arguments: Sequence[str], cwd: Path, environment: dict[str, str], prepare: str = ""
) -> "subprocess.CompletedProcess[str]":
    """The exit code and output of `hpc` with these arguments; `prepare` is Python that its process executes before."""
    task = json.dumps([arguments, str(cwd), environment, prepare]).encode()
    ours, servers = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, open(os.memfd_create("out"), "r+") as out, open(os.memfd_create("err"), "r+") as err:  # noqa: PTH123
        with servers, open(os.devnull) as nothing:  # noqa: PTH123
            socket.send_fds(_server(), [task], [file.fileno() for file in (servers, nothing, out, err)])
        ours.settimeout(_TIMEOUT_SECONDS)
        pid = int(ours.recv(20))
        try:
            code = int(ours.recv(20))
        except BaseException:  # the test's timeout, too
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(["hpc", *arguments], code, out.read(), err.read())


@functools.cache
def _server() -> socket.socket:
    """Where the server of this process takes tasks; it ends with this process."""
    ours, servers = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with servers:
        # OpenBLAS, which NumPy loads, would have threads, and a fork of a process with threads may hang.
        own = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen([sys.executable, __file__], env=own, stdin=servers, stdout=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve() -> None:
    """Fork for each task, and return in the fork as the process of the task."""
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()
    tasks = socket.socket(fileno=os.dup(0))
    with selectors.DefaultSelector() as ready:
        ready.register(tasks, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.data is None:
                    task, descriptors, *_ = socket.recv_fds(tasks, _LONGEST_MESSAGE, 4)
                    if not task:
                        sys.exit()
                    if (pid := os.fork()) == 0:
                        _become(task, descriptors)
                        return
                    reply = socket.socket(fileno=descriptors[0])
                    reply.set_inheritable(False)
                    for descriptor in descriptors[1:]:
                        os.close(descriptor)
                    reply.send(str(pid).encode())
                    ready.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, reply))
                else:
                    pid, reply = key.data
                    with reply, contextlib.suppress(BrokenPipeError):
                        reply.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                    ready.unregister(key.fd)
                    os.close(key.fd)


def _become(task: bytes, descriptors: list[int]) -> None:
    """In a fork: take over what the task says of the process."""
    arguments, cwd, environment, prepare = json.loads(task)
    for number, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = [hpc.__main__.__file__, *arguments]
    exec(prepare, {})


if __name__ == "__main__":
    _serve()
    exit_code = hpc.__main__.main()
    if threading.active_count() == 1:
        # Without the end of the interpreter, which touches, and so copies, all that the server has imported.
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
