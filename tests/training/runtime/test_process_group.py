"""Collectives between real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster import ROOT

from jobs.ranks.rendezvous import pick_port

CONNECT = """
import json, os, sys
from torch import distributed
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from
group = connect(rank_info_from(os.environ))
"""


def ranks(*programs: str) -> list["subprocess.CompletedProcess[str]"]:
    """Run a program as each rank, after it has connected."""
    port = str(pick_port())
    started = []
    for rank, program in enumerate(programs):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(programs), "LOCAL_WORLD_SIZE": len(programs)}
        environment = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", CONNECT + program],
                cwd=ROOT,
                env=environment,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
        )
    found = []
    for process in started:
        output, errors = process.communicate(timeout=200)
        found.append(subprocess.CompletedProcess(process.args, process.returncode, output, errors))
    return found


def test_every_rank_has_the_values_of_all() -> None:
    values = [{"accuracy": 0.1 + 0.2, "path": "ä\udcff"}, None, [1, [2, "x" * 1000]]]
    programs = [f"print(json.dumps(group.all_gather_json({value!r}))); disconnect()" for value in values]
    for done in ranks(*programs):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == values


def test_pickle_of_a_process_that_poses_as_a_rank_is_not_read(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    impostor = f"""
class Pickled:
    def __reduce__(self):
        return os.system, ("touch {evil}",)
distributed.all_gather_object([None, None], Pickled(), group=group.control)
"""
    victim, _ = ranks("group.all_gather_json(True)", impostor)
    assert not evil.exists()
    assert "Error" in victim.stderr.splitlines()[-1]
