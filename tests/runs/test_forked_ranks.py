"""Ranks are forks of torchrun that can use GPUs; if a fork could not, they start without one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.cluster import SHORT_LOCAL, Run, Site, add_script, tiny_data

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
    if os.environ.get("SPOILED"):
        torch.cuda.is_available()
"""
SCRIPT = "import torch\nprint('in a bad fork:', torch.cuda._is_in_bad_fork(), __name__, flush=True)\n"


class SpiedSite(Site):
    """A site without Slurm whose ranks record how they started."""

    @property
    def spied(self) -> dict[str, str]:
        """Return the environment for `hpc submit`."""
        return {"PYTHONPATH": str(self.path / "spy")}

    def noted(self) -> list[tuple[list[str], bool]]:
        """Return the programs of the forked ranks, and whether each could not use GPUs."""
        lines = (self.path / "noted").read_text().splitlines()
        return [(words, bad) for words, bad in map(json.loads, lines)]


@pytest.fixture
def site(shared: Path) -> Iterator[SpiedSite]:
    (shared / "spy").mkdir()
    (shared / "spy" / "sitecustomize.py").write_text(SPY.format(file=str(shared / "noted")))
    tiny_data(shared / "data", train=320, test=100)
    return SpiedSite(shared, "/nonexistent")


def wait_for(run: Run) -> Run:
    run.wait_for_state("completed")
    return run


@pytest.mark.slow
def test_ranks_of_each_kind_can_use_gpus(site: SpiedSite) -> None:
    add_script(site, "program.py", SCRIPT)
    trained = wait_for(site.submit(*SHORT_LOCAL, "--epochs=1", "--name=trained", **site.spied))
    done = site.hpc("evaluate", "trained", "--cluster=local", "--wait", **site.spied)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = wait_for(site.submit(*LOCAL, "--", "program.py", **site.spied))
    assert "in a bad fork: False __main__" in asked.directory.rank_log(1, 0).read_text()
    assert not trained.events("not_forked")
    assert not asked.events("not_forked")
    noted = site.noted()
    kinds = [" ".join(words[:2]).partition("/")[0] for words, _ in noted]
    # The second one evaluates.
    assert kinds == ["-m training", "-m training", "-m training.engine.preflight", "script "]
    assert not any(bad for _, bad in noted)


@pytest.mark.slow
def test_ranks_start_by_themselves_where_a_fork_could_use_no_gpu(site: SpiedSite) -> None:
    add_script(site, "program.py", SCRIPT + "import sys\nsys.exit(len(sys.argv) != 2)\n")
    environment = {**site.spied, "SPOILED": "1"}
    trained = wait_for(site.submit(*SHORT_LOCAL, "--epochs=1", "--name=trained", **environment))
    asked = wait_for(site.submit(*LOCAL, "--name=asked", "--", "program.py", "an argument", **environment))
    assert "in a bad fork: False __main__" in asked.directory.rank_log(1, 0).read_text()
    assert all(bad for _, bad in site.noted())
    for run in (trained, asked):
        [event] = run.events("not_forked")
        assert event["detail"] == f"torch {torch.__version__} had queried the GPUs before the ranks were forked"
        assert f"this rank imports torch itself, which takes longer: {event['detail']}" in (
            run.directory.rank_log(1, 0).read_text()
        )
