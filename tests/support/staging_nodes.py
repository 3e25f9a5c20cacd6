"""Nodes without Slurm: a process and a directory for each, with real agents' links between them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.staging.stager import Staged, Stager
from support.cluster import need
from support.events import records_in

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


@dataclass
class Nodes:
    """The nodes of jobs, without Slurm: a process and a disk for each node."""

    path: Path
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def disk(self, rank: int) -> Path:
        """A node's own disk."""
        directory = self.path / f"disk-{rank}"
        directory.mkdir(exist_ok=True)
        return directory

    def start(
        self, source: Path, count: int = 3, *flags: str, job: str = "job", node_1: Mapping[str, str] = {}
    ) -> list["subprocess.Popen[str]"]:
        """Start a job; `node_1` adds variables to the environment of node 1."""
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        started = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "benchmarks.staging.node", f"--rank={rank}", f"--nodes={count}",
                    f"--port={port}", f"--run={self.path / job}", f"--source={source}",
                    f"--stage-dir={self.disk(rank)}", *flags,
                ],
                cwd=ROOT, env={**os.environ, **(node_1 if rank == 1 else {})}, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        self.processes += started
        return started

    def stage(
        self, source: Path, count: int = 3, *flags: str, job: str = "job", node_1: Mapping[str, str] = {}
    ) -> list[dict[str, Any]]:
        """Run a job to its end. Returns the output of each node."""
        return [answer(process) for process in self.start(source, count, *flags, job=job, node_1=node_1)]

    def events(self, kind: str, job: str = "job") -> list[dict[str, Any]]:
        """The events of a kind that a job has recorded, by node."""
        events = [event for event in records_in(self.path / job / "events") if event["event"] == kind]
        return sorted(events, key=lambda event: str(event["node"]))

    def end(self) -> None:
        """End what is left of the jobs."""
        for process in self.processes:
            process.kill()
            process.communicate()


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Wait for a node, and return its output."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return dict(json.loads(output.splitlines()[-1]))
