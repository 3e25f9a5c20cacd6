"""Staging in jobs on a real Slurm, where each node has a /tmp of its own."""

import json
import os
import pwd
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.cluster import SMALL_BATCH, Run, Site, add_script, commands, is_on
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
    run = submit(site, data, "--nodes=4", "--name=first")
    staged = wait_until_looked_at(run, 4)
    assert sorted(staged) == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert sum(event["bytes_from_source"] for event in staged.values()) == size(data)
    assert not any(event["reused"] or event["in_place"] or event["fallback"] for event in staged.values())
    # Nothing is copied again on the same nodes.
    site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_release()
    again = wait_until_looked_at(run, 4, attempt=2)
    assert all(event["reused"] for event in again.values())
    assert {event["path"] for event in again.values()} == {event["path"] for event in staged.values()}
    end(run, 2)
    # A node that has lost its copy gets it from the others.
    lost = Path(staged["gpu03"]["path"]).parent
    site.slurm("srun", "--nodes=1", "--nodelist=gpu03", "rm", "-r", str(lost))
    run = submit(site, data, "--nodes=4", "--name=second")
    third = wait_until_looked_at(run, 4)
    assert [node for node, event in third.items() if not event["reused"]] == ["gpu03"]
    assert third["gpu03"]["bytes_from_peers"] == size(data)
    end(run)


def inside(node: str) -> tuple[str, ...]:
    """The words before a command that run it where a node has its mounts."""
    daemon = next(at.name for at, words in commands() if words[0].endswith(b"slurmd") and is_on(at, node))
    return "nsenter", f"--target={daemon}", "--mount", "--"


def test_node_whose_mount_of_the_data_hangs_is_left_out_of_the_next_attempt(site: Site) -> None:
    data = photos(site)
    with hanging(data, *inside("gpu02")):
        run = submit(site, data, "--nodes=2", "--stage-timeout=10s")
        run.wait("the exclusion", lambda: run.events("excluded"))
        [ended], [excluded] = run.events("attempt_ended"), run.events("excluded")
        assert (ended["cause"], ended["node"], excluded["excluded"]) == ("bad_node", "gpu02", ["gpu02"])
        assert f"gpu02 has got nothing of {data} for 10 s: that mount" in ended["detail"]
        run.wait_for_release()
        assert "gpu02" not in wait_until_looked_at(run, 2, attempt=2)
    end(run, 2)


def test_two_jobs_that_start_together_on_the_same_nodes_copy_once(site: Site) -> None:
    data = photos(site)
    runs = [submit(site, data, "--nodes=2", f"--name={name}", "--sbatch=nodelist=gpu01,gpu02") for name in ("a", "b")]
    first, second = (wait_until_looked_at(run, 2) for run in runs)
    for node in ("gpu01", "gpu02"):
        assert sorted([first[node]["reused"], second[node]["reused"]]) == [False, True]
    assert sum(event["bytes_from_source"] for event in (*first.values(), *second.values())) <= 2 * size(data)
    for run in runs:
        end(run)


def test_directory_that_another_user_has_planted_is_refused_by_name(ordinary_user: Site, site: Site) -> None:
    data = photos(ordinary_user)
    planted = f"/tmp/torchrelay-{pwd.getpwnam(str(ordinary_user.user)).pw_uid}"
    on_the_node = ("srun", "--nodes=1", "--nodelist=gpu02")
    site.slurm(*on_the_node, "rm", "-rf", planted)  # what runs of a former user with this number have staged
    site.slurm(*on_the_node, "install", "-d", "-m", "700", "-o", "nobody", planted)
    try:
        run = submit(ordinary_user, data, "--nodes=1", "--name=planted", "--sbatch=nodelist=gpu02")
        run.wait("the refusal", lambda: run.events("node_failed"))
        [refused, *_] = run.events("node_failed")
        assert f"{planted} belongs to nobody and is drwx------" in refused["detail"]
        run.cancel()
        assert not site.slurm(*on_the_node, "ls", "-A", planted)
    finally:
        site.slurm(*on_the_node, "rmdir", planted)


# The node that these tests leave as they find it.
NODE = "gpu04"
# On a node: begin to copy, and as soon as there is a part of the copy, do something else.
MEANWHILE = """
set -u
"$0" -m hpc.stage "$1" --json > "$1.out" 2> "$1.err" & copier=$!
until ls /tmp/torchrelay-*/.*.partial/data/large.bin > /dev/null 2>&1; do :; done
eval "$2"
wait $copier
echo $?
"""


SRUN = ("srun", "--quiet", "--nodes=1", f"--nodelist={NODE}")


def on_node(site: Site, *command: str) -> str:
    return site.slurm(*SRUN, *command)


def stage_there(site: Site, data: Path, *flags: str) -> dict[str, Any]:
    return dict(json.loads(on_node(site, sys.executable, "-m", "hpc.stage", str(data), "--json", *flags)))


def while_it_copies(site: Site, data: Path, then: str) -> str:
    """Do something meanwhile, and return the copier's exit code."""
    (data / "large.bin").touch()
    os.truncate(data / "large.bin", 1000 * MB)
    return on_node(site, "bash", "-c", MEANWHILE, sys.executable, str(data), then)


def test_copier_that_is_killed_on_a_node_leaves_nothing_that_is_trusted(site: Site) -> None:
    data = photos(site)
    try:
        assert while_it_copies(site, data, "kill -KILL $copier") == str(128 + signal.SIGKILL)
        os.truncate(data / "large.bin", 20 * MB)
        staged = stage_there(site, data)
        assert not staged["reused"]
        assert on_node(site, "diff", "-r", str(data), staged["path"]) == ""
        # A byte that has changed since, with the file's size and time as they were.
        photo = f"{staged['path']}/7.jpg"
        on_node(
            site, "bash", "-c", f"touch -r {photo} then; printf x | dd of={photo} conv=notrunc; touch -r then {photo}"
        )
        checked = site.type(*SRUN, sys.executable, "-m", "hpc.stage", str(data), "--verify", "--json")
        assert (checked.returncode, json.loads(checked.stdout)[0]["damaged"]) == (1, ["7.jpg"])
        assert on_node(site, "diff", "-r", str(data), staged["path"]) == ""
    finally:
        on_node(site, sys.executable, "-m", "hpc.stage", "--clean")


def test_source_that_changes_while_it_is_copied_is_refused_on_a_node(site: Site) -> None:
    data = photos(site)
    try:
        assert while_it_copies(site, data, 'touch "$1/large.bin"') == "1"
        said = data.with_suffix(".err").read_text()
        assert f"{data}/large.bin was changed while the data were being copied" in said
        assert json.loads(on_node(site, sys.executable, "-m", "hpc.stage", "--list", "--json")) == []
    finally:
        on_node(site, sys.executable, "-m", "hpc.stage", "--clean")


def test_run_on_a_disk_that_is_too_small_reads_in_place_and_says_so(site: Site) -> None:
    data, small = photos(site), "/tmp/small"
    on_node(site, "bash", "-c", f"mkdir {small} && mount -t tmpfs -o size=8m,mode=1777 tmpfs {small}")
    try:
        run = submit(site, data, "--nodes=1", "--name=small", f"--stage-dir={small}", f"--sbatch=nodelist={NODE}")
        run.wait("the staging", lambda: run.events("staged"))
        [staged] = run.events("staged")
        assert staged["path"] == str(data)
        assert "(RAM-backed) has 7 MB available, but the data need 22 MB" in staged["in_place"]
        assert any(f"{NODE} reads {data} in place" in warning for warning in run.status()["warnings"])
    finally:
        site.end_all_jobs()
        on_node(site, "bash", "-c", f"umount {small} && rmdir {small}")


def test_hostile_archive_ends_the_run_and_leaves_nothing(site: Site) -> None:
    photos(site)
    with tarfile.open(site.path / "evil.tar", "w") as file:
        file.add(site.path / "look.py", "inside.py")
        file.add(site.path / "look.py", "../../outside.py")
    run = submit(site, site.path / "evil.tar", "--nodes=1", "--name=evil", f"--sbatch=nodelist={NODE}")
    run.wait("the refusal", lambda: run.events("node_failed"))
    assert (
        "'../../outside.py' leads out of the archive; nothing of it was kept" in run.events("node_failed")[0]["detail"]
    )
    run.cancel()
    assert on_node(site, "find", "/tmp", "-name", "*side.py") == ""


def test_trainer_reads_what_was_in_an_archive(site: Site) -> None:
    subprocess.run(["tar", "czf", site.path / "data.tar.gz", "-C", site.path, "data"], check=True)
    run = site.submit("--data=data.tar.gz", "--nodes=2", "--gpus-per-node=1", *SMALL_BATCH, "--epochs=1")
    status = run.wait_for_state("completed")
    assert status["test_accuracy"] is not None
    assert all(event["path"].endswith("/data") for event in run.events("staged"))
