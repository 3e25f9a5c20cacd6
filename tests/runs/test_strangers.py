"""Projects of strangers' shapes run as under torchrun in their directory, though interrupted twice.

They are in tests/strangers, each with a setup.sh that makes what is not in it. Those of libraries are collected where
TORCHRELAY_EXAMPLES names the Python of their environment (examples/README.md).
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.cluster import ROOT, TWO_NODES, Run, Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

PROJECTS = ROOT / "tests" / "strangers"
LIBRARIES = os.environ.get("TORCHRELAY_EXAMPLES")


@dataclass(frozen=True, kw_only=True)
class Project:
    """How a project is started, and what it leaves."""

    words: tuple[str, ...] = ("train.py",)
    """Its script and the arguments."""
    final: str
    progress: str = r"epoch (\d+) done"
    """The pattern of a line that says how far it is."""
    python: str = sys.executable


OWN = {
    "ignored_data": Project(final="out/final.pt"),
    "outputs": Project(final="results/first/weights/final.pt"),
}
OF_LIBRARIES = {
    "hydra": Project(words=("train.py", "data.rows=48"), final="outputs/first/final.pt", python=LIBRARIES or ""),
    "lightning": Project(final="checkpoints/last.ckpt", python=LIBRARIES or ""),
    "transformers": Project(
        final="output/final/model.safetensors", progress=r"'epoch': '?([\d.]+)", python=LIBRARIES or ""
    ),
}
ALL = {**OWN, **(OF_LIBRARIES if LIBRARIES else {})}
QUICK = {"ignored_data"}


def make_project(name: str, directory: Path) -> None:
    """Copy the project and have it make its data and its repository."""
    shutil.copytree(PROJECTS / name, directory)
    identity = {f"GIT_{role}_{part}": "a@b" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {**identity, "LOOP": str(PROJECTS / "loop.py"), "PATH": path}
    subprocess.run(["sh", "-e", "setup.sh"], cwd=directory, env={**os.environ, **own}, check=True)


def files_below(directory: Path) -> set[Path]:
    """Return the relative paths of the files, also of those behind links, without those of git, Python and runs."""
    every = {Path(top, name) for top, _, names in os.walk(directory, followlinks=True) for name in names}
    ours = {".git", "__pycache__", ".torchrelay", "runs"}
    return {path for each in every if not ours & set((path := each.relative_to(directory)).parts)}


def run_under_torchrun(project: Project, directory: Path) -> None:
    """Run the project to its end, as its author does."""
    torchrun = [project.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *project.words]
    plain = subprocess.run(torchrun, cwd=directory, capture_output=True, text=True, check=False)
    assert plain.returncode == 0, plain.stderr


def progress(run: Run, project: Project) -> list[float]:
    """Return the numbers in rank 0's lines of progress, of all attempts, in order."""
    logs = sorted(run.directory.logs.glob("attempt-*/rank-0*0.log"))
    return [float(number) for log in logs for number in re.findall(project.progress, log.read_text(errors="replace"))]


def interrupt(run: Run, project: Project, kind: str) -> None:
    """Wait until the script has got further, and have a failure."""
    seen = len(progress(run, project))
    run.wait("progress", lambda: len(progress(run, project)) >= seen + 3)
    done = run.site.hpc("drill", str(run.directory.path), kind, "--yes")
    assert done.returncode == 0, done.stderr + run.evidence()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ALL])
def test_project_runs_as_under_torchrun_though_interrupted(site: Site, tmp_path: Path, name: str) -> None:
    project, plain, ours = ALL[name], tmp_path / name, site.path / name
    for directory in (plain, ours):
        make_project(name, directory)
    before = files_below(ours)
    assert before == files_below(plain)
    run_under_torchrun(project, plain)

    python = [] if project.python == sys.executable else [f"--python={project.python}"]
    flags = (*TWO_NODES, "--grace-period=3s", f"--runs-dir={site.path / 'runs'}", f"--name={name}", *python)
    run = Site(ours, site.slurm_conf).submit(*flags, "--", *project.words)
    for kind in ("worker-kill", "preempt"):
        interrupt(run, project, kind)
    status = run.wait_for_state("completed")

    assert [attempt["cause"] for attempt in status["attempts"]][-2:] == ["preempted", "completed"]
    if name == "transformers":
        assert status["interruptions"][-1]["steps_lost"] == 0, "torchrelay has attached its callback"
    numbers = progress(run, project)
    assert numbers.count(numbers[0]) == 1, "it has never begun from nothing again"
    new = files_below(plain) - before
    assert new, "it writes something"
    assert new <= files_below(run.directory.code)
    if project.final.endswith("final.pt"):
        weights, expected = (torch.load(directory / project.final) for directory in (run.directory.code, plain))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
