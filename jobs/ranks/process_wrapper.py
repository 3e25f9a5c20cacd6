"""Wraps torchrun, and each of its ranks, so that they handle signals and end as the agent needs. Runs on compute nodes.

Python starts it by the path of this directory, without site-packages, so that it starts in milliseconds and a user's
program needs nothing of ours:

    python -S jobs/ranks torchrun PROGRAM ARGS...       runs torchrun, and waits until all its processes have ended
    python -S jobs/ranks container PROGRAM ARGS...      becomes the program, which starts a container
    python -S jobs/ranks rank LOG_DIR NODE_DIR RANK...  runs one rank, writes its log, and records its failure
    python -P jobs/ranks own RANK...                    runs a rank's code in a Python of its own, instead of a fork

RANK is `PROGRAM ARGS...`, `-m MODULE ARGS...` (a torchrelay module), or `script FILE.py ARGS...` or `script -m MODULE
ARGS...` (a user's code). In all but the first form, `rank` runs in a fork of torchrun (`--run-path`). torchrun has
imported what the ranks need (training.runtime.__main__), so that a restarted rank imports nothing. If torchrun has
used the GPU driver, however, its forks cannot use it. Each rank then runs as `own`, which takes longer to start.

This process sets Slurm's signals to be ignored, which survives exec. The agent has threads, so it must not do that
itself, between fork and exec. This process also writes logs and failures, because people look for a rank's log and for
the rank that failed first: torchrun names its logs by local rank and restart, and reports failures only at its end.
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from hpc.base.environment import HEARTBEAT, PARENT, RESTARTS
from hpc.base.kernel import adopt_orphans, children, die_with_parent, end_children, name_process, open_gpu_files
from hpc.base.traceback_text import describe_exception
from jobs.compat import has_queried_gpus_before_the_fork
from jobs.ranks import WRAPPER
from jobs.ranks.helper_processes import ToldToEnd, protect_helper_processes
from jobs.ranks.script.step_counter import read_count
from jobs.ranks.slurm_variables import task_variables

_IN_A_FORK = ("-m", "script")
# The agent (jobs.ranks.torchrun) sends this signal, and so does the kernel when the agent has ended.
_END = signal.SIGRTMIN
_END_SECONDS, _LOOK_SECONDS = 1.0, 1.0
_TAIL_BYTES, _LONGEST_DETAIL = 65536, 500


def run_torchrun(*program: str) -> None:
    """Run torchrun, wait until no process of its ranks exists, and end as torchrun ended."""
    name_process(WRAPPER, ["torchrelay wrapper"], "torchrun")
    signal.signal(_END, _end_torchrun)
    die_with_parent(_parent(), _END)
    _ignore_slurm()
    signal.signal(signal.SIGINT, lambda *_: None)  # torchrun has its own handler, and does not inherit this one
    _, status = _run(program, signal.SIG_IGN)
    if left := end_children():
        _say(f"processes {left} of ranks could not be killed")
        from hpc.base.errors import EXIT_BAD_NODE  # noqa: PLC0415  # slow to import, and rarely needed

        os._exit(EXIT_BAD_NODE)
    _end_as(status)


def _end_torchrun(*_: object) -> None:
    """Kill torchrun, because the agent asks for that or has ended. The ranks and their wrappers die with torchrun."""
    running = children(os.getpid())
    if not running:
        os._exit(1)
    for pid in running:
        with contextlib.suppress(PermissionError):  # a process of another user, by sudo or su
            os.kill(pid, signal.SIGKILL)


def become_container(*program: str) -> None:
    """Replace this process by the program that starts a container."""
    die_with_parent(_parent())
    _ignore_slurm()
    os.execvp(program[0], program)  # noqa: S606 - a list, no shell


def _parent() -> int | None:
    """Return the id of the process that has started this one; None in a container, whose engine does not say it."""
    parent = os.environ.pop(PARENT, None)
    return int(parent) if parent else None


def _ignore_slurm() -> None:
    """Ignore Slurm's signals, also for torchrun, which would kill its ranks before they could save."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def run_rank(log_dir: str, node_dir: str, *program: str) -> None:
    """Run one rank, record its failure if it fails, and end as it ended. Returns only if it did not fail."""
    die_with_parent(_parent())
    if program[0] in _IN_A_FORK:
        # torchrun starts a session only for a program that it executes. The agent takes a fork without one for stuck.
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # torchrun has its own handler
    # Write no core files: a rank that hangs is aborted, and its memory would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    name_process(WRAPPER, ["torchrelay wrapper"], f"rank {rank}/{os.environ.get('WORLD_SIZE', '?')}")
    os.environ.update(task_variables(os.environ))
    log, exits = os.path.join(log_dir, f"rank-{rank:02d}.log"), os.path.join(node_dir, "exits")
    size_before = _print_to(log)
    if program[0] in _IN_A_FORK and (reason := _why_no_gpus()):
        _say(f"this rank imports torch itself, which takes longer: {reason}")
        program = (sys.executable, "-P", os.path.dirname(os.path.abspath(__file__)), "own", *program)
    os.environ[HEARTBEAT] = heartbeat = os.path.join(node_dir, "heartbeats", f"local-{local_rank}")
    # time.monotonic() cannot be set, and is the same for all processes of a node.
    started = time.monotonic()
    kills = _out_of_memory_kills()
    # If this process is killed, the agent learns of the rank only from this file.
    running = f"running-{os.getpid()}.json"
    start = {"rank": rank, "restarts": int(os.environ.get(RESTARTS, "0"))}
    with contextlib.suppress(OSError):
        _write_whole(exits, running, {**start, "pid": os.getpid(), "started_at": started})

    def on_sigterm(*_: object) -> None:
        # Either torchrun is ending the ranks because another one has failed, and SIGKILL follows. Or Slurm has sent
        # SIGTERM to all processes, and the rank saves.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _remove(os.path.join(exits, running))

    pid, status = _run(program, on_sigterm, ToldToEnd().look)
    if status and os.path.exists(os.path.join(exits, "stopping")):
        # On a failure, torchrun would end the other ranks, which still save, and restart all ranks.
        status = 0
    by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if status:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have no names
        record = {
            **start,
            "started_at": started,
            "failed_at": time.monotonic(),
            "exit_code": -by_signal if by_signal else os.waitstatus_to_exitcode(status),
            "signal": names.get(by_signal, f"SIG{by_signal}") if by_signal else None,
            "out_of_memory": by_signal == signal.SIGKILL and _out_of_memory_kills() > kills,
            "step": _last_step(heartbeat, pid),
            "counted_steps": _counted_steps(heartbeat, pid),
            "detail": _last_line(log, size_before, killed=by_signal is not None),
        }
        _record_failure(exits, f"{time.monotonic_ns():020d}-{local_rank}.json", record)
    else:
        with contextlib.suppress(OSError):
            _write_whole(exits, f"ended-{local_rank}.json", {**start, "counted_steps": _counted_steps(heartbeat, pid)})
    _remove(os.path.join(exits, running))
    # Processes that survive this become children of torchrun, which ends them.
    end_children(_END_SECONDS)
    _end_as(status)


def _end_as(status: int) -> None:
    """End with the program's signal or exit code, for the parent to see; return if the program succeeded."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if status:
        os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _say(text: str) -> None:
    """Print a line unbuffered. A full disk must not change how this process ends, not even by a flush at its end."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="backslashreplace"))


def _print_to(log: str) -> int:
    """Redirect the output of this process and its rank to the log, and return the size of the log so far."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        _say(f"{log} cannot be written: {error}")  # this line goes into the agent's log
        return 0
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    return os.fstat(descriptor).st_size


def _run(
    program: tuple[str, ...],
    on_sigterm: Callable[..., None] | signal.Handlers,
    look: Callable[[int], None] | None = None,
) -> tuple[int, int]:
    """Run the program to its end, and return its pid and wait status. The program does not outlive this process.

    Until SIGTERM comes, `look` is called every second with the program's pid.
    """
    parent = os.getpid()
    adopt_orphans()
    # The program ignores SIGTERM until it installs a handler, which tells the agent that the rank can save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pid = os.fork()
    if pid:
        if look:
            signal.signal(signal.SIGALRM, lambda *_: look(pid))
            signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
        signal.signal(signal.SIGTERM, on_sigterm)
        while (ended := os.wait())[0] != pid:
            pass  # an orphan that this process adopted
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return ended
    try:
        die_with_parent(parent)
        _become(program)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:  # noqa: BLE001  # the interpreter would print it, too
        traceback.print_exc()
        os._exit(1)
    os._exit(127)


def _why_no_gpus() -> str:
    """Return why this fork of torchrun cannot use GPUs; empty if it can.

    torch's own flag misses some ways to start the driver, but the driver's files are open then.
    """
    if has_queried_gpus_before_the_fork():
        return f"torch {sys.modules['torch'].__version__} had queried the GPUs before the ranks were forked"
    file = next(iter(open_gpu_files().values()), None)
    return f"{file} was open before the ranks were forked" if file else ""


def _become(program: tuple[str, ...]) -> None:
    if program[0] not in _IN_A_FORK:
        try:
            os.execvp(program[0], program)  # noqa: S606 - a list, no shell
        except OSError as error:
            os.write(2, f"{program[0]} cannot be started: {error}\n".encode())
            return
    # Close what exec would close: torchrun's connections are not this rank's.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > sys.stderr.fileno():
            with contextlib.suppress(OSError):
                os.close(descriptor)
    command = program[1:] if program[0] == "script" else program
    if command[0] != "-m":
        command = (os.path.relpath(command[0]), *command[1:])
    rank = os.environ["RANK"]
    name_process(f"rank-{rank}", command, f"rank {rank}/{os.environ.get('WORLD_SIZE', '?')}")
    protect_helper_processes()
    if program[0] == "script":
        from jobs.ranks.script.forked_script import run_script  # noqa: PLC0415  # the other forms need nothing of it

        run_script(program[1:])
    sys.argv = list(program[1:])
    runpy.run_module(program[1], run_name="__main__", alter_sys=True)


def _out_of_memory_kills() -> int:
    """Return how many processes of this node, in any cgroup, the kernel has killed because memory ran out."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _last_step(heartbeat: str, pid: int) -> int | None:
    """Return the last step that the rank had done; None if unknown. The agent's last poll may have missed it."""
    try:
        with open(heartbeat) as file:
            fields = json.load(file)
        step = fields["step"] if fields["pid"] == pid and fields.get("phase") != "start" else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a program without heartbeats, or with its own format
    return step if type(step) is int and 0 <= step < 2**63 else None


def _counted_steps(heartbeat: str, pid: int) -> int | None:
    count = read_count(heartbeat)
    return count.steps if count and count.pid == pid else None


def _last_line(log: str, size_before: int, *, killed: bool) -> str:
    """Return the message of the exception that ended the rank, or the last line that it printed.

    If a signal killed the rank, only lines of the C++ runtime or of Python's faulthandler count.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(size_before, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"{log} cannot be read: {error}"
    lines = [line for line in text.splitlines() if any(map(str.isalnum, line))]
    if killed:
        said = [line for line in lines if line.lstrip().startswith("what():")]
        lines = said or [line for line in lines if line.startswith("Fatal Python error")]
    elif exception := describe_exception(text.splitlines()):
        return exception
    return lines[-1].strip()[:_LONGEST_DETAIL] if lines else ""


def _record_failure(exits: str, name: str, record: Mapping[str, object]) -> None:
    """Record a failure for the agent.

    A failure that is not recorded does not count, so the ranks would repeat it for ever. If its record cannot be
    written, torchrun is killed, because the agents count the failures of torchrun, too.
    """
    try:
        _write_whole(exits, name, record)
    except OSError as error:
        _say(f"{record} could not be written: {error}")
        os.kill(os.getppid(), signal.SIGKILL)


def _write_whole(directory: str, name: str, record: Mapping[str, object]) -> None:
    path, hidden = os.path.join(directory, name), os.path.join(directory, "." + name)
    with open(hidden, "w") as file:
        json.dump(record, file)
    os.replace(hidden, path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def main(argv: Sequence[str]) -> None:
    """Run the form of the wrapper that the first word names."""
    form, *words = argv
    if form == "torchrun":
        run_torchrun(*words)
    elif form == "container":
        become_container(*words)
    elif form == "own":
        _become(tuple(words))
    else:
        run_rank(*words)
