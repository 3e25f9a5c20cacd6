"""Asks the Linux kernel for time, processes, memory, file systems and network; ends processes. Runs everywhere."""

import ctypes
import fcntl
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc.base.environment import RUN_DIR
from hpc.base.files import expanded

# Positions of fields after the process name in /proc/PID/stat. proc(5) gives the first of them the number 3.
_STATE, _USER_TIME, _START_TIME, _ARGUMENTS_BEGIN, _ARGUMENTS_END = 3 - 3, 14 - 3, 22 - 3, 48 - 3, 49 - 3
_SIOCGIFADDR = 0x8915
_GPU_FILES = "/dev/nvidia"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
# Children get time to end by themselves: helper processes of Python and torch first remove shared memory.
_ASK_SECONDS, _KILL_SECONDS, _POLL_SECONDS = 0.1, 0.5, 0.01
# Each line has an address, index, prefix length, scope, flags and interface.
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_LINK_LOCAL = 0x20
RAM_BACKED = frozenset({"tmpfs", "ramfs", "rootfs"})
"""Types of file systems in memory. A diskless node that runs from its initramfs has its root on `rootfs`."""
NETWORK_BACKED = frozenset({
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "fuse.ceph-fuse", "cifs", "smb3", "9p", "afs",
    "wekafs", "panfs", "pvfs2", "fuse.glusterfs", "fuse.sshfs", "fuse.juicefs", "fuse.moosefs", "fuse.s3fs",
})  # fmt: skip
"""Types of file systems on other machines."""
ENDING_SIGNALS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM,
)  # fmt: skip
"""Signals that Slurm, or a user with `scancel --signal`, sends to a job. By default, each ends a process."""
_CLOCK_OFFSET = time.time() - time.monotonic()


def steady_time(monotonic: float | None = None) -> float:
    """Return the time in seconds since the epoch, by a clock that nobody can set.

    `monotonic` is a value of time.monotonic(), by default now. Use this clock for times that are compared later: if
    somebody set the clock of time.time() back by an hour, the agents would ignore new failures and hangs for an hour.
    """
    return _CLOCK_OFFSET + (time.monotonic() if monotonic is None else monotonic)


def _stat(pid: str | int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process's name; empty if there is no such process."""
    try:
        # The name may have any bytes: the kernel cuts it to 15, perhaps within a character.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_time(pid: str | int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process."""
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else None


def process_state(pid: str | int) -> str | None:
    """Return the kernel's letter for a process's state (R, S, D, T, Z); None if there is no such process."""
    fields = _stat(pid)
    return fields[_STATE] if fields else None


def children(pid: int) -> list[int]:
    """Return the ids of a process's children, zombies included."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
                found += [int(child) for child in path.read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, their children, and so on."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def activity(pid: int) -> tuple[float, int]:
    """Return the seconds of processor time of a process and its descendants, and the bytes that they read and wrote.

    The bytes are those of read(2) and write(2), so they include what a process prints, but not its connections.
    """
    seconds, volume = 0.0, 0
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        fields = _stat(pid)
        seconds = sum(map(int, fields[_USER_TIME : _USER_TIME + 2])) / os.sysconf("SC_CLK_TCK")
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        volume = int(counts["rchar"]) + int(counts["wchar"])
    below = [activity(child) for child in children(pid)]
    return seconds + sum(each for each, _ in below), volume + sum(each for _, each in below)


def is_alive(pid: str | int, started: int | None) -> bool:
    """Return whether the process with this id and `start_time` runs; False for a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] != "Z" and int(fields[_START_TIME]) == started


def in_signal_mask(pid: int, mask: str, number: signal.Signals) -> bool:
    """Return whether a process's `mask` has a signal; False if the process has ended.

    The masks are those of proc(5): SigCgt (handled), SigIgn (ignored), SigBlk (blocked), ShdPnd (blocked and arrived).
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    bits = next((line.split()[1] for line in status.splitlines() if line.startswith(f"{mask}:")), "0")
    return bool(int(bits, 16) >> (number - 1) & 1)


def open_gpu_files() -> dict[int, str]:
    """Return the device files of NVIDIA GPUs that this process has open, as paths by descriptor."""
    found = {}
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # the listing's own descriptor is closed by now
            found[int(descriptor.name)] = str(descriptor.readlink())
    return {descriptor: path for descriptor, path in found.items() if path.startswith(_GPU_FILES)}


def name_process(name: str, command: Sequence[str], part: str) -> None:
    """Set this process's name and command line. The command line becomes `COMMAND [PART of RUN]`.

    `top` shows the name, of at most 15 bytes; `ps`, `nvidia-smi` and py-spy show the command line. The name must have
    no space: Slurm's proctrack/linuxproc cannot read a name with a space in /proc, and would neither suspend nor kill
    this process (seen with 22.05.8).

    The kernel reads the command line from this process's memory, where it is overwritten. So a longer command is cut;
    the environment variables, which follow there, stay. The package setproctitle does the same in C, but the Python of
    a user's script lacks it.
    """
    run = os.environ.get(RUN_DIR)
    place = os.fsencode(f"\0[{part} of {os.path.basename(run)}]\0" if run else f"\0[{part}]\0")  # noqa: PTH119 - fast
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
        fields = _stat("self")
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        words = os.fsencode("\0".join(command))[: max(0, end - begin - len(place))]
        memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
        try:
            # The last byte stays 0: otherwise, the kernel would add the environment variables.
            os.pwrite(memory, (words + place)[: end - begin - 1].ljust(end - begin, b"\0"), begin)
        finally:
            os.close(memory)


def has_name(pid: int, name: str) -> bool:
    """Return whether a process has this name; False if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace") == f"{name}\n"
    except (FileNotFoundError, ProcessLookupError):
        return False


def sync_file_system(directory: Path) -> None:
    """Flush all files of a directory's file system to its storage. For 700 small files, fsync takes 10 times as long.

    Raises:
        OSError: the storage has failed.
    """
    libc, descriptor = ctypes.CDLL(None, use_errno=True), os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if libc.syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
    finally:
        os.close(descriptor)


def die_with_parent(parent: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends. The setting survives exec, but not fork.

    `parent` is the id of the process that has started this one; None if unknown. If it has ended before this call, the
    kernel sends no signal, and this process exits.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended. The setting survives exec, but not fork."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(seconds: float = 30.0) -> list[int]:
    """End the children of this process and the orphans that it adopts; wait until the kernel has freed their resources.

    Processes that do not end by themselves get SIGTERM, then SIGKILL. Returns the ids that still exist after `seconds`.
    """
    began, asked = time.monotonic(), set[int]()
    while left := [child for child in children(os.getpid()) if not _reap(child)]:
        passed = time.monotonic() - began
        if passed > seconds:
            return left
        for child in left:
            is_deaf = passed > _KILL_SECONDS or in_signal_mask(child, "SigBlk", signal.SIGTERM)
            number = signal.SIGKILL if is_deaf else signal.SIGTERM
            if passed > _ASK_SECONDS and (number == signal.SIGKILL or child not in asked):
                asked.add(child)
                with suppress(PermissionError):  # the process of another user, by sudo or su
                    os.kill(child, number)
        time.sleep(_POLL_SECONDS)
    return []


def _reap(child: int) -> bool:
    """Reap a child if all its threads, which may hold memory, GPUs and ports, have ended. Return whether it is gone."""
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


def raise_open_files_limit() -> None:
    """Let this process and its children open as many files and connections as the administrators allow."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's driver; None if none is loaded."""
    with suppress(OSError):
        found = re.search(r"\d+\.\d+(\.\d+)*", path.read_text())
        return found[0] if found else None
    return None


def resident_memory_bytes() -> int:
    """Return this process's resident memory in bytes, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def file_system_type(path: Path) -> str | None:
    """Return the file system type of a path, which need not exist; None if unknown."""
    mounts = Path("/proc/mounts").read_text(errors="replace").splitlines()
    return mounted_type(mounts, expanded(path).resolve())


def mounted_type(mounts: Sequence[str], path: Path) -> str | None:
    """Return the type of an absolute path's file system, from the lines of /proc/mounts; None if no mount contains it.

    Of several mounts at one point, the last counts. An overlay has the type of the directory to which it writes,
    because that directory is in memory on a diskless node.
    """
    found, longest = "", 0
    for line in mounts:
        point = Path(_unescape(line.split()[1]))
        if path.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = line, len(point.parts)
    if not found:
        return None
    _, _, kind, options, *_ = found.split()
    upper = re.search(r"(?:^|,)upperdir=([^,]+)", options)
    # In a container, the upper directory may be hidden. The result is then the overlay's own type.
    below = [line for line in mounts if line != found]
    return (mounted_type(below, Path(_unescape(upper[1]))) if upper else None) or kind


def _unescape(path: str) -> str:
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), path)


def interface_addresses() -> dict[str, list[str]]:
    """Return the addresses of every network interface that has any, by interface name, in the kernel's order.

    The IPv4 address comes before the IPv6 ones. Link-local IPv6 addresses are left out: other nodes cannot use them.
    """
    found = dict[str, list[str]]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an IPv4 address
                found[name] = [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])]
    with suppress(FileNotFoundError):  # a kernel without IPv6
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != _LINK_LOCAL:
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


# Parameters of mallopt(3), and the largest mmap threshold that glibc accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_BYTES = -1, -3, 32 * 2**20
MOST_FREED_BYTES = 2**31 - 1
"""The most bytes that `keep_freed_memory` can keep."""


# Each step on a CPU allocates and frees the same tensors. By default glibc returns much of the freed memory to the
# kernel, which must clear its pages before the next use. How much glibc returns depends on the order of the first
# allocations: one start of a training made up to 27,000 page faults a step; a second start made 400, and was 45 %
# faster (small-cnn, 64 images of 64 pixels; docs/explanation/performance.md).
def keep_freed_memory(most_bytes: int) -> None:
    """Let glibc keep freed memory and reuse it for tensors of up to 32 MiB. Do nothing with another C library.

    glibc returns the memory at the end of its heap only if more than `most_bytes` are free there.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, most_bytes)
