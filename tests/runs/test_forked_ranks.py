"""Ranks are forks of torchrun that can use GPUs. If a fork could not: jobs/ranks/test_torchrun_processes.py."""

import json
from pathlib import Path

import pytest
from support.cluster import SHORT_LOCAL, Site, add_script, tiny_data

pytestmark = pytest.mark.timeout(400)
LOCAL = ("--cluster=local", "--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1")
# Python imports this at its start, in torchrun and so in its forks.
SPY = """
import json, os, sys

if any(word.endswith("training/runtime") for word in sys.orig_argv):
    import torch

    def note() -> None:
        # A fork of a wrapper is a rank.
        if sys.argv[0].endswith("jobs/ranks"):
            with open({file!r}, "a") as file:
                file.write(json.dumps([sys.argv[4:], torch.cuda._is_in_bad_fork()]) + "\\n")

    os.register_at_fork(after_in_child=note)
"""
SCRIPT = "import torch\nprint('in a bad fork:', torch.cuda._is_in_bad_fork(), __name__, flush=True)\n"


@pytest.mark.slow
def test_ranks_of_each_kind_can_use_gpus(shared: Path) -> None:
    (shared / "spy").mkdir()
    (shared / "spy" / "sitecustomize.py").write_text(SPY.format(file=str(shared / "noted")))
    tiny_data(shared / "data", train=320, test=100)
    site, spied = Site(shared, "/nonexistent"), {"PYTHONPATH": str(shared / "spy")}
    add_script(site, "program.py", SCRIPT)
    trained = site.submit(*SHORT_LOCAL, "--epochs=1", "--name=trained", **spied)
    trained.wait_for_state("completed")
    done = site.hpc("evaluate", "trained", "--cluster=local", "--wait", **spied)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = site.submit(*LOCAL, "--", "program.py", **spied)
    asked.wait_for_state("completed")
    assert "in a bad fork: False __main__" in asked.directory.rank_log(1, 0).read_text()
    assert not any("imports torch itself" in run.directory.rank_log(1, 0).read_text() for run in (trained, asked))
    noted = [json.loads(line) for line in (shared / "noted").read_text().splitlines()]
    kinds = [" ".join(words[:2]).partition("/")[0] for words, _ in noted]
    # The second one evaluates.
    assert kinds == ["-m training", "-m training", "-m training.engine.preflight", "script "]
    assert not any(bad for _, bad in noted)
