"""`hpc smoke` on a real Slurm, by an ordinary user: a slow pair of nodes, and a job that is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TIMEOUT_SECONDS, Site

from hpc.slurm.client import TESTBED_DIRECTORY

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]
THREE, TWO = ("--nodes=3", "--gpus-per-node=1"), ("--nodes=2", "--gpus-per-node=1")
NODES = ("gpu01", "gpu02", "gpu03")


def smoke(site: Site, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = site.hpc("smoke", *arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def slow_link(sender: str, receiver: str, testbed: dict[str, Any]) -> Iterator[None]:
    """100 megabits per second from one node to another one; all its other links are as before."""
    address = next(node["address"] for node in testbed["nodes"] if node["name"] == receiver)
    tc = ("nsenter", f"--net={TESTBED_DIRECTORY / 'ns' / sender}.net", "tc")
    filter_words = ("protocol", "ip", "u32", "match", "ip", "dst", f"{address}/32", "flowid", "1:1")
    for words in (
        ("qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "2"),
        ("class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", "htb", "rate", "100mbit"),
        ("class", "add", "dev", "eth0", "parent", "1:", "classid", "1:2", "htb", "rate", "100gbit"),
        ("filter", "add", "dev", "eth0", "parent", "1:", *filter_words),
    ):
        subprocess.run([*tc, *words], check=True)
    try:
        yield
    finally:
        subprocess.run([*tc, "qdisc", "del", "dev", "eth0", "root"], check=True)


def test_smoke_measures_all_and_the_next_one_names_the_pair_that_has_become_slow(
    ordinary_user: Site, testbed: dict[str, Any]
) -> None:
    _, first = smoke(ordinary_user, *THREE)
    assert [node["name"] for node in first["nodes"]] == list(NODES)
    for node in first["nodes"]:
        assert (node["problem"], node["staging_problem"]) == ("", "")
        assert node["write_bytes_per_second"] > 0
        assert node["staged_bytes_per_second"] > 0
        assert abs(node["clock_seconds"]) < 1, "they have the clock of one machine"
    assert [rank["node"] for rank in first["ranks"]] == list(NODES)
    assert [one["message_bytes"] for one in first["all_reduce"]] == [2**10, 2**13, 2**16, 2**20, 2**24]
    assert sorted(tuple(pair["nodes"]) for pair in first["pairs"]) == list(combinations(NODES, 2))
    assert first["changes"] == []
    with slow_link("gpu02", "gpu03", testbed):
        code, second = smoke(ordinary_user, *THREE)
    assert code == 1
    assert "gpu02 - gpu03" in [one["where"] for one in second["slow"]]
    assert ("gpu02 - gpu03", "sends") in [(one["where"], one["what"]) for one in second["changes"]]
    kept = sorted((ordinary_user.path / "runs").iterdir())
    assert [str(path) for path in kept if path in map(Path, second["files"])] == sorted(second["files"])
    assert len(kept) == 4, "a file of each kind for each, and nothing else"
    assert "gpu02 - gpu03: it sends" in Path(second["files"][1]).read_text()


@pytest.mark.parametrize("how", ["Ctrl-C", "scancel"])
def test_smoke_that_is_interrupted_keeps_nothing_and_leaves_nothing(ordinary_user: Site, how: str) -> None:
    command = [sys.executable, "-m", "hpc", "smoke", *TWO]
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    typed = ordinary_user._as_the_user({})  # noqa: SLF001 - as its other methods do
    with subprocess.Popen(command, **typed, **out, start_new_session=True) as running:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        # Written by the first node when it begins, so the job is in the middle.
        while not list(ordinary_user.path.glob("**/.smoke-*/events/*.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if how == "Ctrl-C":
            os.killpg(running.pid, signal.SIGINT)
        else:
            ordinary_user.slurm("scancel", "--me")
        printed, problem = running.communicate(timeout=TIMEOUT_SECONDS)
    assert running.returncode == (130 if how == "Ctrl-C" else 1), problem
    assert printed == ""
    if how == "scancel":
        assert "hpc smoke: the job ended before a node answered" in problem
    assert not list(ordinary_user.path.glob("**/*smoke-*"))
    while ordinary_user.slurm("squeue", "--me", "--noheader"):
        assert time.monotonic() < deadline, "the job does not end"
        time.sleep(0.3)
