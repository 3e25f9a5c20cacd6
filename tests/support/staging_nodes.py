"""Nodes without Slurm: a process and a directory for each, with real agents' links between them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jobs.staging.stager import Staged, Stager
from support.cluster import need

ROOT = Path(__file__).parents[2]
# A file system of FUSE whose server never answers: whoever asks it waits in the kernel (state D), as behind a dead NFS
# server. It ends with the process.
HANG = """
import ctypes, os, sys
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"hangs", os.fsencode(sys.argv[1]), b"fuse", 0, options):
    raise OSError(ctypes.get_errno(), "mount")
print("mounted", flush=True)
sys.stdin.read()
"""


@contextmanager
def hanging(path: Path, *inside: str) -> Iterator[None]:
    """A directory whose mount hangs; `inside`: the words before a command that run it where it is mounted."""
    need("umount")
    command = [*inside, sys.executable, "-S", "-c", HANG, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "mounted\n"
        try:
            yield
        finally:
            subprocess.run([*inside, "umount", "--lazy", str(path)], check=True)
            server.kill()


def stage(source: Path, stage_dir: Path) -> Staged:
    """Stage on this node alone."""
    with Stager(stage_dir) as stager:
        return stager.stage(source)


def contents(path: Path) -> dict[str, bytes]:
    """Return all files below a directory, by their paths in it."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def disk(path: Path, rank: int) -> Path:
    """A node's own disk."""
    directory = path / f"disk-{rank}"
    directory.mkdir(exist_ok=True)
    return directory


def start_nodes(
    path: Path, source: Path, count: int, *flags: str, job: str = "job", environments: Mapping[int, dict[str, str]] = {}
) -> list["subprocess.Popen[str]"]:
    """Start a job; `environments` adds variables to the environments of some nodes."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    return [
        subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.staging.node", f"--rank={rank}", f"--nodes={count}", f"--port={port}",
                f"--run={path / job}", f"--source={source}", f"--stage-dir={disk(path, rank)}", *flags,
            ],
            cwd=ROOT, env={**os.environ, **environments.get(rank, {})}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip


def end_nodes(processes: list["subprocess.Popen[str]"]) -> None:
    """End what is left of a job."""
    for process in processes:
        process.kill()
        process.communicate()
