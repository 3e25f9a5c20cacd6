"""Staging in jobs on a real Slurm, where each node has a /tmp of its own."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Run, Site, add_script, commands, is_on
from support.staging_nodes import hanging

pytestmark = pytest.mark.slurm

MB = 2**20
# Looks at every byte, and waits until it is told to end.
SCRIPT = """
import os, pathlib, time
copy = pathlib.Path(os.environ["TORCHRELAY_DATA"])
run = pathlib.Path(os.environ["TORCHRELAY_RUN_DIR"])
assert copy.is_relative_to("/tmp") and copy.stat().st_mode & 0o777 == 0o700, copy
for path in pathlib.Path(os.environ["PHOTOS"]).iterdir():
    assert (copy / path.name).read_bytes() == path.read_bytes(), path
(run / f"looked-{os.environ['TORCHRELAY_ATTEMPT']}-{os.environ['RANK']}").touch()
while not (run / f"end-{os.environ['TORCHRELAY_ATTEMPT']}").exists():
    time.sleep(0.2)
"""


def photos(site: Site, name: str = "photos") -> Path:
    """Small files, and one that is read in parts."""
    path = site.path / name
    path.mkdir()
    for number in range(40):
        (path / f"{number}.jpg").write_bytes(os.urandom(50_000))
    (path / "large.bin").write_bytes(os.urandom(20 * MB))
    add_script(site, "look.py", SCRIPT)
    return path


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def submit(site: Site, data: Path, *flags: str) -> Run:
    return site.submit(f"--data={data}", "--gpus-per-node=1", *flags, "--", "look.py", PHOTOS=str(data))


def wait_until_looked_at(run: Run, ranks: int, attempt: int = 1) -> dict[str, dict[str, Any]]:
    """What the nodes of the attempt say of their copies, once every rank has seen that its copy is right."""
    looked = f"looked-{attempt}-*"
    run.wait("the look at all copies", lambda: len(list(run.directory.path.glob(looked))) == ranks)
    return {event["node"]: event for event in run.events("staged") if event["attempt"] == attempt}


def end(run: Run, attempt: int = 1) -> None:
    (run.directory.path / f"end-{attempt}").touch()
    run.wait_for_state("completed")


def test_nodes_stage_once_each_and_shared_storage_is_read_once(site: Site) -> None:
    data = photos(site)
    run = submit(site, data, "--nodes=2")
    staged = wait_until_looked_at(run, 2)
    assert sorted(staged) == ["gpu01", "gpu02"]
    assert sum(event["bytes_from_source"] for event in staged.values()) == size(data)
    assert not any(event["reused"] or event["in_place"] or event["fallback"] for event in staged.values())
    site.slurm("scontrol", "requeue", run.job_id)
    run.wait("the requeue", lambda: run.queue("%T %r") == "PENDING BeginTime")
    copies = f"/tmp/torchrelay-{os.getuid()}"
    site.slurm("srun", "--quiet", "--nodes=1", "--nodelist=gpu02", "rm", "-r", copies)
    run.wait_for_next_job()
    # Nothing is copied again where it is, and what a node lacks comes from the other one.
    again = wait_until_looked_at(run, 2, attempt=2)
    assert (again["gpu01"]["reused"], again["gpu01"]["path"]) == (True, staged["gpu01"]["path"])
    assert (again["gpu02"]["reused"], again["gpu02"]["bytes_from_peers"]) == (False, size(data))
    end(run, 2)


def inside(node: str) -> tuple[str, ...]:
    """The words before a command that run it where a node has its mounts."""
    daemon = next(at.name for at, words in commands() if words[0].endswith(b"slurmd") and is_on(at, node))
    return "nsenter", f"--target={daemon}", "--mount", "--"


def test_node_whose_mount_of_the_data_hangs_is_left_out_of_the_next_attempt(site: Site) -> None:
    data = photos(site)
    with hanging(data, *inside("gpu02")):
        run = submit(site, data, "--nodes=2", "--stage-timeout=10s")
        run.wait_for_next_job()
        [ended], [excluded] = run.events("attempt_ended"), run.events("resubmitted")
        assert (ended["cause"], ended["node"], excluded["excluded"]) == ("bad_node", "gpu02", ["gpu02"])
        assert f"gpu02 has got nothing of {data} for 10 s: that mount" in ended["detail"]
        assert "gpu02" not in wait_until_looked_at(run, 2, attempt=2)
    end(run, 2)
