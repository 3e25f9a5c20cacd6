"""Each mistake ends with exit code 2 and one line with the value and the fix; nothing is queued or left behind.

What is refused before sbatch is called is tested with a sinfo that prints what the testbed's prints.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TIMEOUT_SECONDS, Site, mounted_volume, shared_directory, tiny_data
from support.fake_slurm import SINFO, SINFO_TEXT, write_programs

from hpc.slurm.sinfo import parse_partitions, partitions

NOTHING_QUEUES = "echo 'sbatch was called' >&2; exit 1"


def write_files(path: Path) -> None:
    """Write what the mistakes name."""
    tiny_data(path / "data", train=320, test=100)
    (path / "runs" / "taken").mkdir(parents=True)
    (path / "list.yaml").write_text("- 1\n")
    (path / "broken.yaml").write_text("a: [\n")
    for name in ("file", "train.py", "train.sh"):
        (path / name).write_text("")


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    path = shared_directory()
    write_files(path)
    (path / "torchrelay.yaml").write_text("")
    write_programs(path / "bin", sbatch=NOTHING_QUEUES, squeue="exit 0", scontrol="exit 1", sinfo=SINFO)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def site(files: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose Slurm consists of shell scripts."""
    monkeypatch.setenv("PATH", str(files / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(files))
    return Site(files, "/nonexistent")


@pytest.fixture(scope="module")
def cluster(testbed: dict[str, Any]) -> Iterator[Site]:
    """The same files on the testbed."""
    path = shared_directory()
    write_files(path)
    yield Site(path, testbed["slurm_conf"])
    shutil.rmtree(path)


def refused(site: Site, *arguments: str, **environment: str) -> str:
    """The line with which a submission is refused; the fixture `testbed` sees to it that no job is left."""
    before = sorted(site.path.rglob("*"))
    done = site.hpc("submit", *arguments, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(site.path.rglob("*")) == before
    return done.stderr


@pytest.fixture
def defaults(site: Site) -> Iterator[Path]:
    """The user's file of defaults."""
    path = site.path / "torchrelay.yaml"
    yield path
    path.write_text("")


@pytest.mark.parametrize(
    ("text", "arguments", "variables", "message"),
    [
        ("nodes: 5\n", [], {}, r"--nodes is 5, but partition gpu has 4"),
        ("nodes: 5\n", ["--nodes=6"], {}, r"--nodes is 6, but partition gpu has 4"),
        ("partition: one\n", [], {"SBATCH_PARTITION": "two"}, r"--partition 'two' does not exist"),
        ("", ["-p", "three"], {"SBATCH_PARTITION": "two"}, r"--partition 'three' does not exist"),
        ("nodez: 5\n", [], {}, r"defaults \S+/torchrelay.yaml cannot set 'nodez': did you mean nodes"),
        ("recipe: digits\n", [], {}, r"torchrelay.yaml cannot set 'recipe'"),
    ],
)
def test_bad_defaults_are_refused_and_the_nearest_place_wins(
    site: Site, defaults: Path, text: str, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    defaults.write_text(text)
    assert re.search(message, refused(site, "--data=data", *arguments, **variables))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data=file"], r"--data is .*/file, which is not a directory"),
        (["--nodes=2", "--gpus-per-node=4", "--batch-size=7"], r"--batch-size is 7, too small for the 8 ranks"),
        (["--exclusive"], r"there is no flag --exclusive: use --sbatch exclusive$"),
        (["--name=taken"], r"run 'taken' exists already in runs: choose another --name"),
        (["--runs-dir=file/x"], r"--runs-dir file/x: .* is not a directory"),
        (["--stage-timeout=1s"], r"--stage-timeout is 1s: use 10s or more"),
        (["--runs-dir=a%j"], r"Slurm replaces %"),
        (["--config=list.yaml"], r"--config list.yaml is not a mapping"),
        (["--config=broken.yaml"], r"--config broken.yaml cannot be read"),
        (["--runs-dir=/tmp/runs"], r"--runs-dir /tmp/runs is on this node's own disk: use a directory that all"),
        (["--config=none.yaml"], r"--config none.yaml cannot be read: .*No such file"),
        (["--", "trian.py"], r"script 'trian.py' does not exist: did you mean train.py\?"),
        (["--", "./train.sh"], r"'./train.sh' is not a Python file: after --, give the file that it runs on each rank"),
        (["--sbatch=array=0-3"], r"--sbatch array: job arrays are not supported: submit one run per setting"),
        (["--sbatch=hetjob"], r"--sbatch hetjob: heterogeneous jobs are not supported: submit one run, or one per"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(site: Site, arguments: list[str], message: str) -> None:
    given = {argument.partition("=")[0] for argument in arguments}
    data = [] if given & {"--data", "--"} else ["--data=data"]
    assert re.search(message, refused(site, *data, *arguments))


def test_data_on_a_nodes_own_disk_are_refused(site: Site) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as disk:
        data = tiny_data(Path(disk, "data"), train=10, test=10)
        assert f"--data {data} is on this node's own disk" in refused(site, f"--data={data}")


def test_testbed_prints_what_the_shell_script_prints(cluster: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.slurm_conf)
    assert partitions() == parse_partitions(SINFO_TEXT)


# sbatch's own refusals, of which --dry-run hears from `sbatch --test-only`.
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--constraint=a100"], r"Invalid feature specification$"),
        (["--mem=640G", "--dry-run"], r".*Requested node configuration is not available"),
        (["--sbatch=foo=bar"], r"unrecognized option '--foo=bar'$"),
        (["--sbatch=mail-type"], r".*mail-type"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_sbatch_refuses(cluster: Site, arguments: list[str], message: str) -> None:
    printed = refused(cluster, "--data=data", *arguments)
    assert re.search(f"sbatch refused the job: {message}", printed, re.MULTILINE)


def test_full_and_read_only_runs_directories(site: Site) -> None:
    with mounted_volume(site.path / "volume", "size=1m") as volume:
        assert "volume: its file system is full" in refused(site, "--data=data", "--runs-dir=volume")
        subprocess.run(["mount", "-o", "remount,ro,size=200m", str(volume)], check=True)
        assert re.search("volume.* not writable", refused(site, "--data=data", "--runs-dir=volume/new"))


def test_controller_that_is_down(cluster: Site) -> None:
    configuration = Path(cluster.slurm_conf).read_text()
    dead = re.sub(r"(?m)^SlurmctldPort=.*$", "SlurmctldPort=1", configuration)
    assert dead != configuration
    (cluster.path / "dead.conf").write_text(dead)
    done = cluster.hpc("submit", "--data=data", SLURM_CONF=str(cluster.path / "dead.conf"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), "this is no mistake of the user's"
    assert "Slurm does not answer" in done.stderr
    assert "--cluster local" in done.stderr


def wait_for_nodes(site: Site) -> None:
    """Wait until all nodes answer Slurm, as they do not at once after a change of their state."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while "*" in (states := site.slurm("sinfo", "--noheader", "--Node", "--format=%T")):
        assert time.monotonic() < deadline, states
        time.sleep(0.3)


def test_dry_run_prints_the_script_and_leaves_nothing(cluster: Site) -> None:
    """Flags override the file."""
    wait_for_nodes(cluster)
    (cluster.path / "good.yaml").write_text("nodes: 3\ngpus_per_node: 4\ntime: 3h\ndata: data\nsbatch: [comment=a b]\n")
    before = sorted(cluster.path.rglob("*"))
    done = cluster.hpc("submit", "--config=good.yaml", "--nodes=2", "--dry-run", "--name=it's $dry")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in ("--nodes=2", "--gpus-per-node=4", "--cpus-per-task=8", "--requeue", "--partition=gpu", "--time=180"):
        assert f"#SBATCH {line}" in lines
    assert "#SBATCH --comment='a b'" in lines
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert re.fullmatch(r"hpc submit: Slurm expects to start it at \S+ on gpu\[01-02\]\n", done.stderr)
    assert sorted(cluster.path.rglob("*")) == before


def test_dry_run_on_a_cluster_whose_nodes_are_out_of_service(cluster: Site) -> None:
    """sbatch would queue the job, though `sbatch --test-only` refuses it."""
    cluster.slurm("scontrol", "update", "NodeName=gpu[01-03]", "State=drain", "Reason=test")
    try:
        done = cluster.hpc("submit", "--data=data", "--nodes=2", "--dry-run", "--json")
    finally:
        cluster.slurm("scontrol", "update", "NodeName=gpu[01-03]", "State=resume")
        wait_for_nodes(cluster)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["expected_start"] is None
    assert "#SBATCH --time=60\n" in answer["text"], "the partition's default"
    assert "Slurm does not say when it would start: type sinfo" in done.stderr
