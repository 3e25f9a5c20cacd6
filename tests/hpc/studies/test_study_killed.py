"""If controllers of sweeps and scaling studies are killed or run twice, no run is lost, made twice or removed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Site
from support.fake_slurm import HANGS, SBATCH, kill_when_reached, queued, queueing_site, replace, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
COMMON = ("--name=pets", "--synthetic", "--cpus-per-gpu=1", "--batch-size=8", "--once")
SWEEP = ("sweep", "--param=lr=0.1,0.2", "--sampler=grid", "--parallel=1", "--gpus-per-node=1", *COMMON)
SCALING = ("scaling", "--nodes", "1", "2", "--gpus-per-node", "1", *COMMON)
GOES_ON = {SWEEP: ("sweep", "--name=pets", "--once"), SCALING: ("scaling", "--name=pets", "--once")}
FIRST = {SWEEP: "pets-000", SCALING: "pets-1x1"}
# Hangs while a run's directory is made and has no name yet.
IN_DRAFT = f'if ls -d {{0}}/runs/pets/.pets-*.tmp >&2; then {HANGS}; fi; exec {shutil.which("git")} "$@"'

kinds = pytest.mark.parametrize("start", [SWEEP, SCALING], ids=["sweep", "scaling"])


@pytest.fixture
def here(shared: Path) -> tuple[Site, dict[str, str]]:
    return queueing_site(shared)


def goes_on(site: Site, environment: dict[str, str], start: tuple[str, ...]) -> None:
    """Type the command that continues the group."""
    done = site.hpc(*GOES_ON[start], **environment)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@kinds
def test_killed_while_it_made_its_first_run_and_again_before_that_was_submitted(
    here: tuple[Site, dict[str, str]], start: tuple[str, ...]
) -> None:
    site, environment = here
    replace(site, "git", IN_DRAFT)
    kill_when_reached(site, environment, *start)
    replace(site, "git", None)
    replace(site, "sbatch", HANGS)
    kill_when_reached(site, environment, *GOES_ON[start])
    replace(site, "sbatch", SBATCH)
    for _ in range(2):
        goes_on(site, environment, start)
        assert queued(site) == [FIRST[start]]


@kinds
def test_second_controller_while_the_first_makes_its_first_run(
    here: tuple[Site, dict[str, str]], start: tuple[str, ...]
) -> None:
    site, environment = here
    replace(site, "git", IN_DRAFT)
    with started(site, environment, *start) as first:
        replace(site, "git", None)
        goes_on(site, environment, start)
        assert queued(site) == [FIRST[start]]
        (site.path / "go").touch()
        assert first.communicate()[1].count("Traceback") == 0
        assert first.returncode == 0
    assert queued(site) == [FIRST[start]]
    assert (site.path / "runs/pets" / FIRST[start] / "spec.json").exists()


def test_three_starts_at_once(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    out: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    command = [sys.executable, "-m", "hpc", *SWEEP]
    several = [subprocess.Popen(command, cwd=site.path, env={**os.environ, **environment}, **out) for _ in range(3)]
    errors = [one.communicate()[1] for one in several]
    assert sorted(one.returncode for one in several) == [0, 2, 2], errors
    says = "pets exists already: choose another --name, or type hpc sweep --name pets to continue it"
    assert [says in error for one, error in zip(several, errors, strict=True) if one.returncode == 2] == [True] * 2
    assert queued(site) == [FIRST[SWEEP]]


def test_refused_first_run_takes_nothing_of_another_controller(here: tuple[Site, dict[str, str]]) -> None:
    site, environment = here
    replace(site, "sbatch", f"{HANGS}; echo 'sbatch: error: invalid' >&2; exit 1")
    with started(site, environment, *SWEEP) as first:
        # This controller starts the other trial, because each has its own --parallel.
        replace(site, "sbatch", SBATCH)
        done = site.hpc(*GOES_ON[SWEEP], "--parallel=2", **environment)
        assert done.returncode == 0, done.stderr
        (site.path / "go").touch()
        assert "invalid" in first.communicate()[1]
    assert queued(site) == ["pets-001"]
    assert (site.path / "runs/pets/pets-001/spec.json").exists()
