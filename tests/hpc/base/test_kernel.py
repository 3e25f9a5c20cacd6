"""The names of processes as other processes see them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import ROOT

from hpc.base.kernel import has_name

NAMES = """
import os, sys
from hpc.base.kernel import name_process
name_process("rank-3", [*sys.argv[2:], sys.argv[1]], "rank 3/8")
print(os.environ["TORCHRELAY_RUN_DIR"], os.popen("echo $LATER").read().strip(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("length", "is_cut"), [(10, False), (400, True)])
def test_process_says_what_it_is(length: int, is_cut: bool) -> None:
    command = ["train.py", "--lr", "0.1"]
    environment = {"PYTHONPATH": str(ROOT), "TORCHRELAY_RUN_DIR": "/runs/my-run", "LATER": "kept"}
    # The name replaces the words of the command line, which are longer by half of the code.
    words = [sys.executable, "-c", NAMES + "#" * length, "x" * (length if not is_cut else 3000)]
    with subprocess.Popen(
        [*words[:3], words[3], *command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "/runs/my-run kept\n", "the variables stay"
        seen = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
        assert seen[:3] == command
        assert seen[-1] == "[rank 3/8 of my-run]"
        assert has_name(process.pid, "rank-3")
        assert not has_name(process.pid, "rank")
        process.communicate()
    assert not has_name(process.pid, "rank-3"), "it has ended"
