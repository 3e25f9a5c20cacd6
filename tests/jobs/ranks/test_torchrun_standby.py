"""The torchrun that waits for its round, as a real torchrun that has imported torch."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.cluster import ROOT
from support.waiting import wait_for

from hpc.base.kernel import children, has_name
from hpc.base.transport import pick_port
from hpc.run.nodedir import NodeDir
from jobs.ranks import WRAPPER
from jobs.ranks.rank_environment import torchrun_environment
from jobs.ranks.torchrun import PROCESS_WRAPPER, Rendezvous, Standby, torchrun_argv

SCRIPT = """
import json, os, sys
seen = {name: os.environ.get(name) for name in ("TORCHRELAY_DATA", "GLOO_SOCKET_IFNAME", "USERS")}
print(json.dumps([sys.argv[1:], seen, "torch" in sys.modules, sys.stdin.read()]))
"""


@pytest.fixture
def standby() -> Iterator[Standby]:
    with closing(Standby()) as found:
        yield found


@pytest.fixture
def node_dir(tmp_path: Path) -> NodeDir:
    found = NodeDir(tmp_path)
    for each in found.directories:
        each.mkdir(exist_ok=True)
    (tmp_path / "script.py").write_text(SCRIPT)
    return found


def command(directory: Path, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    rendezvous = Rendezvous(
        run="r", attempt=1, secret="s", round=1, num_nodes=1, host="localhost", port=pick_port(), node=0
    )  # fmt: skip
    script = ["script", str(directory / "script.py"), *arguments]
    argv = torchrun_argv(
        rendezvous, 1, "127.0.0.1", sys.executable,
        [str(PROCESS_WRAPPER), "rank", str(directory), str(directory), *script],
    )  # fmt: skip
    return argv, torchrun_environment(rendezvous, {**os.environ, "TORCHRELAY_PRELOAD": "torch", **variables})


def test_round_starts_in_the_torchrun_that_waits(node_dir: NodeDir, standby: Standby) -> None:
    directory = node_dir.path
    standby.prepare(*command(directory, GLOO_SOCKET_IFNAME="lo", USERS="own"), ROOT)
    argv, environment = command(directory, "--lr", "$0.1", GLOO_SOCKET_IFNAME="eth7", USERS="own", TORCHRELAY_DATA="/d")
    torchrun = standby.take(argv, environment)
    assert torchrun is not None
    with torchrun:
        wait_for(lambda: torchrun.exit_code is not None)
        assert torchrun.exit_code == 0, (directory / "rank-00.log").read_text()
    seen = {"TORCHRELAY_DATA": "/d", "GLOO_SOCKET_IFNAME": "eth7", "USERS": "own"}
    log = (directory / "rank-00.log").read_text()
    assert json.loads(log) == [["--lr", "$0.1"], seen, True, ""]
    assert standby.take(argv, environment) is None, "one torchrun is good for one round"


def test_torchrun_that_does_not_fit_is_ended(node_dir: NodeDir, standby: Standby) -> None:
    def wrappers() -> list[int]:
        return [pid for pid in children(os.getpid()) if has_name(pid, WRAPPER)]

    standby.prepare(*command(node_dir.path, USERS="own"), ROOT)
    wait_for(wrappers)
    assert standby.take(*command(node_dir.path, USERS="other")) is None
    assert not wrappers()
