"""Ranks in a real Apptainer container, on a real Slurm. More refusals: hpc/submissions/test_user_environment.py."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.cluster import TWO_NODES, Run, Site, add_script, assert_nothing_left, commands
from support.environments import ROOT, make_torch_venv

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(400),
    # Debian 12 and 13 have none: make matrix SLURM=26.05 TESTS=tests/runs/test_container.py
    pytest.mark.skipif(shutil.which("apptainer") is None, reason="no Apptainer here"),
]
# One rank dies in the middle of the first attempt, which then waits to be requeued.
TRAINS = """
import os, signal, sys, time
import torch
from torch import distributed

attempt, rank = os.environ["TORCHRELAY_ATTEMPT"], os.environ["RANK"]
print("found", open("/marker").read(), sys.prefix, os.path.exists("/etc/hostname"), os.getcwd(), flush=True)
print("data", sorted(os.listdir(os.environ["TORCHRELAY_DATA"])), flush=True)
distributed.init_process_group("gloo")
value = torch.ones(1)
distributed.all_reduce(value)
open(os.environ["TORCHRELAY_RUN_DIR"] + f"/seen-{rank}", "w").close()
if attempt == "1":
    if rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    def save(*_):
        print("saves", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("waits", flush=True)
    time.sleep(1000)
print("trained", value.item(), flush=True)
distributed.destroy_process_group()
"""


@pytest.fixture
def image(ordinary_user: Site) -> tuple[Path, dict[str, str]]:
    """An image without Python, into which the user's own variable mounts this machine's and a venv with torch."""
    root = ordinary_user.path / "root"
    for name in ("usr", "etc", "opt", "proc", "sys", "dev", "tmp", "var/tmp", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "marker").write_text("inside")
    path = ordinary_user.path / "image.sif"
    subprocess.run(["apptainer", "--quiet", "build", path, root], check=True)
    make_torch_venv(ordinary_user.path / "env")
    mounts = f"/usr,{ROOT}/.venv,{ordinary_user.path}/env:/opt/env"
    return path, {"APPTAINER_BIND": mounts}


def printed(run: Run, attempt: int, rank: int) -> list[str]:
    log = run.directory.rank_log(attempt, rank)
    return log.read_text().splitlines() if log.exists() else []


def test_ranks_in_a_container_fail_stop_and_continue(ordinary_user: Site, image: tuple[Path, dict[str, str]]) -> None:
    site, (path, mounts) = ordinary_user, image
    add_script(site, "trains.py", TRAINS)
    (site.path / "pictures").mkdir()
    (site.path / "pictures" / "one.txt").write_text("1")
    flags = (*TWO_NODES, f"--container={path}", "--python=/opt/env/bin/python", "--data=pictures")
    run = site.submit(*flags, "--", "trains.py", **mounts)
    run.wait("the ranks", lambda: all("waits" in printed(run, 1, rank) for rank in (0, 1)))
    [killed] = run.events("interruption")
    assert (killed["rank"], killed["cause"]) == (1, "crashed")
    found = f"found inside /opt/env False {run.directory.code}"
    for rank in (0, 1):
        lines = printed(run, 1, rank)
        assert (lines.count(found), lines.count("data ['one.txt']")) == (2, 2), "torchrun has restarted both"
    site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_next_job()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
    for rank in (0, 1):
        assert printed(run, 1, rank)[-1] == "saves"
        assert printed(run, 2, rank)[-1] == "trained 2.0"
    assert_nothing_left(run)


def test_ranks_in_a_container_that_handle_no_signal_are_killed(
    ordinary_user: Site, image: tuple[Path, dict[str, str]]
) -> None:
    site, (path, mounts) = ordinary_user, image
    add_script(site, "sleeps.py", "import time\nprint('sleeps', flush=True)\ntime.sleep(1000)\n")
    run = site.submit(*TWO_NODES, f"--container={path}", "--python=/opt/env/bin/python", "--", "sleeps.py", **mounts)
    run.wait("the ranks", lambda: all("sleeps" in printed(run, 1, rank) for rank in (0, 1)))
    engine = [words for _, words in commands() if b"pptainer" in words[0]]
    assert len(engine) == 2, "one on each node"
    run.cancel()
    assert_nothing_left(run)
    run.wait("the end of Apptainer", lambda: not any(b"pptainer" in words[0] for _, words in commands()))
