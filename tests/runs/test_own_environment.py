"""What a user's script finds on the nodes: the environment that --setup makes, and the user's own Python."""

import subprocess
from pathlib import Path

import pytest
from support.cluster import TWO_NODES, Site, add_script
from support.environments import BASE, SITE, make_torch_venv

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
# As on a cluster, where /etc/profile.d defines the function, which no batch script reads.
MODULES = """
module() { echo "$SLURM_RESTART_COUNT" >> loaded; export LOADED="$2" PYTHONPATH="/opt/$2:$PYTHONPATH"; }
"""
PRINTS = """
import os, sys, time
print("found", os.environ["LOADED"], os.environ["QUOTED"], "/opt/cuda/12.4" in sys.path, flush=True)
if os.environ["TORCHRELAY_ATTEMPT"] == "1":
    time.sleep(1000)
"""
QUOTED = 'it\'s "$HOME" \\\\ `x`'


def test_setup_reaches_the_ranks_of_all_nodes_at_every_start(site: Site) -> None:
    add_script(site, "prints.py", PRINTS)
    (site.path / "modules.sh").write_text(MODULES)
    (site.path / "config.yaml").write_text("setup: [source ./modules.sh, module load cuda/12.4]\n")
    quoted = "export QUOTED='" + QUOTED.replace("'", "'\\''") + "'"
    run = site.submit(*TWO_NODES, "--config=config.yaml", f"--setup={quoted}", "--", "prints.py")
    found = f"found cuda/12.4 {QUOTED} True"

    def both_found(attempt: int) -> bool:
        logs = [run.directory.rank_log(attempt, rank) for rank in (0, 1)]
        return all(log.exists() and found in log.read_text().splitlines() for log in logs)

    run.wait("the ranks", lambda: both_found(1))
    site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_next_job()
    status = run.wait_for_state("completed")
    assert both_found(2)
    assert len(status["attempts"][-1]["nodes"]) == 2
    assert (site.path / "loaded").read_text().splitlines() == ["", "1"], "once per job start, on the first node alone"


@pytest.mark.parametrize(
    ("line", "ended"), [("echo no module; (exit 7)", "exit code 7"), ("set -u; exit 0", "exit code 0")]
)
def test_setup_that_fails_on_two_nodes_ends_the_run(site: Site, line: str, ended: str) -> None:
    add_script(site, "prints.py", PRINTS)
    run = site.submit(*TWO_NODES, f"--setup={line}", "--setup=touch went-on", "--", "prints.py")
    run.wait_for_next_job()
    status = run.wait_for_state("failed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["bad_node", "bad_node"]
    assert f"--setup '{line}' ended with {ended}" in status["detail"]
    assert status["attempts"][0]["nodes"][0] != status["attempts"][1]["nodes"][0]
    assert not run.events("joined")
    assert not (site.path / "went-on").exists()
    printed = site.hpc("logs", str(run.directory.path), "--all").stdout
    assert ("no module" in printed) == ("echo" in line)


def test_nodes_without_apptainer_cannot_train_in_a_container(site: Site) -> None:
    """--setup was to bring it."""
    add_script(site, "prints.py", PRINTS)
    image, programs = site.path / "image.sif", site.path / "bin"
    image.touch()
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in {"apptainer", "singularity"}:
            (programs / program.name).symlink_to(program)
    flags = ("--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", f"--container={image}")
    run = site.submit(*flags, "--setup=true", "--", "prints.py", PATH=str(programs))
    run.wait_for_next_job()
    status = run.wait_for_state("failed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["crashed", "crashed"]
    assert f"has neither apptainer nor singularity, for --container {image}" in status["detail"]


def test_torch_may_come_from_a_module(site: Site) -> None:
    """The interpreter imports torch with --setup alone: torchrun, preflight and ranks have it, on the nodes."""
    module, python = make_torch_venv(site.path / "module") / SITE, site.path / "env" / "bin" / "python"
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(python.parents[1])], check=True)
    add_script(site, "prints.py", "import sys, torch; print('found', sys.prefix, torch.__file__)\n")
    flags = ("--nodes=1", "--gpus-per-node=1", "--cpus-per-gpu=1", f"--python={python}")
    run = site.submit(*flags, f"--setup=export PYTHONPATH={module}", "--", "prints.py")
    run.wait_for_state("completed")
    assert run.directory.rank_log(1, 0).read_text().splitlines()[-1] == (
        f"found {python.parents[1]} {module}/torch/__init__.py"
    )
