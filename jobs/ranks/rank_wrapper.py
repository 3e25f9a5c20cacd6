"""Once per rank, its keeper: sends the rank's output to its own log, starts its program, and writes down how it ended.

Runs as a script, with nothing but the standard library, so that a user's program needs nothing of ours on its path:
`rank.py LOG_DIR NODE_DIR PROGRAM ARGS...`. torchrun's own log files are numbered by local rank and restart, and it
tells how a rank ended only when it gives up; people look for the rank, and for the first that failed.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)
_TAIL_BYTES, _LONGEST_DETAIL = 65536, 500
_VMSTAT = "/proc/vmstat"


def main(log_dir: str, node_dir: str, *program: str) -> None:
    """Keep one rank, and end as its program ended."""
    _die_with_parent()
    # A rank that hangs is aborted: its memory would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    log = os.path.join(log_dir, f"rank-{rank:02d}.log")
    before = _write_to(log)
    os.environ["TORCHRELAY_HEARTBEAT"] = heartbeat = os.path.join(node_dir, "heartbeats", f"local-{local_rank}")
    started, kills = time.time(), _out_of_memory_kills()
    pid, status = _run(program)
    if status:
        by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        record = {
            "rank": rank,
            "started_at": started,
            "failed_at": time.time(),
            "exit_code": -by_signal if by_signal else os.waitstatus_to_exitcode(status),
            "signal": _name(by_signal) if by_signal else None,
            "out_of_memory": by_signal == signal.SIGKILL and _out_of_memory_kills() > kills,
            "step": _last_step(heartbeat, pid),
            "detail": _last_words(log, before, killed=by_signal is not None),
        }
        _write(os.path.join(node_dir, "exits"), f"{time.time_ns()}-{local_rank}.json", json.dumps(record))
    _end_like(status)


def _write_to(log: str) -> int:
    """Send all output to a log, and return its size until now. Without a log the output is in the agent's."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"{log} cannot be written: {error}", flush=True)
        return 0
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    return os.fstat(descriptor).st_size


def _run(program: tuple[str, ...]) -> tuple[int, int]:
    """Run the program to its end and return its pid and wait status. It does not outlive this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _die_with_parent()
            if os.getppid() == parent:
                os.execvp(program[0], program)  # noqa: S606 - a list, no shell
        except OSError as error:
            os.write(2, f"{program[0]} cannot be started: {error}\n".encode())
        os._exit(127)
    return os.waitpid(pid, 0)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"  # a real-time signal


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: an agent that is killed leaves no ranks behind."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _out_of_memory_kills() -> int:
    """How many processes of this node the kernel has killed for want of memory, in any cgroup."""
    try:
        with open(_VMSTAT) as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _last_step(heartbeat: str, pid: int) -> int | None:
    """The last step that the rank had done: the agent, which looks a few times a second, may have seen an older one."""
    try:
        with open(heartbeat) as file:
            fields = json.load(file)
        return fields.get("step") if fields["pid"] == pid else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a program without heartbeats, or one that writes what it likes


def _last_words(log: str, before: int, *, killed: bool) -> str:
    """What the rank said last since it began: of a Python exception, the line that names it.

    Who is killed by a signal says nothing about it, unless Python's faulthandler does.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(before, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            said = file.read().decode(errors="replace")
    except OSError as error:
        return f"{log} cannot be read: {error}"
    lines = [line for line in said.splitlines() if any(map(str.isalnum, line))]
    if killed:
        lines = [line for line in lines if line.startswith("Fatal Python error")]
    return lines[-1].strip()[:_LONGEST_DETAIL] if lines else ""


def _write(directory: str, name: str, text: str) -> None:
    """Write a file whole.

    A failure that nobody hears of would be repeated for ever. So if it cannot be written, torchrun ends with it: the
    agents count that too.
    """
    path, hidden = os.path.join(directory, name), os.path.join(directory, "." + name)
    try:
        with open(hidden, "w") as file:
            file.write(text)
        os.replace(hidden, path)
    except OSError as error:
        print(f"{text} could not be written: {error}", flush=True)
        os.kill(os.getppid(), signal.SIGKILL)


def _end_like(status: int) -> None:
    """End as the program did, for torchrun to see."""
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
