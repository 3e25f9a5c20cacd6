"""Each mistake ends with exit code 2 and one line with the value and the fix; nothing is queued or left behind."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TIMEOUT_SECONDS, Site, mounted_volume, shared_directory, tiny_data


@pytest.fixture(scope="module")
def site(testbed: dict[str, Any]) -> Iterator[Site]:
    path = shared_directory()
    tiny_data(path / "data")
    (path / "empty").mkdir()
    node_local = Path("/tmp/torchrelay-test-data")
    shutil.rmtree(node_local, ignore_errors=True)  # of an earlier run that was killed
    tiny_data(node_local)
    (path / "text").mkdir()
    (path / "text" / "notes.txt").write_text("no image")
    (path / "runs" / "taken").mkdir(parents=True)
    (path / "unknown.yaml").write_text("data: data\nbatch_sise: 64\n")
    (path / "nested.yaml").write_text("train:\n  lr: 1\n")
    (path / "list.yaml").write_text("- 1\n")
    (path / "broken.yaml").write_text("a: [\n")
    (path / "type.yaml").write_text("data: data\nepochs: many\n")
    (path / "file").write_text("")
    yield Site(path, testbed["slurm_conf"])
    shutil.rmtree(path)
    shutil.rmtree(node_local)


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("text", "arguments", "variables", "message"),
    [
        ("nodes: 5\n", [], {}, r"--nodes is 5, but partition gpu has 4"),
        ("nodes: 5\n", ["--nodes=6"], {}, r"--nodes is 6, but partition gpu has 4"),
        ("partition: one\n", [], {"SBATCH_PARTITION": "two"}, r"--partition 'two' does not exist"),
        ("partition: one\n", [], {}, r"--partition 'one' does not exist"),
        ("", ["-p", "three"], {"SBATCH_PARTITION": "two"}, r"--partition 'three' does not exist"),
        ("", [], {"SBATCH_TIMELIMIT": "2880"}, r"--time is 2880m, but partition gpu allows"),
        ("", [], {"SBATCH_CONSTRAINT": "nosuchfeature"}, r"sbatch refused the job: .*[Ff]eature"),
        ("sbatch: nosuchoption\n", [], {}, r"sbatch refused the job: .*nosuchoption"),
        ("nodez: 5\n", [], {}, r"defaults \S+/torchrelay.yaml: there is no flag 'nodez': did you mean nodes"),
    ],
)
def test_bad_defaults_are_refused_and_the_nearest_place_wins(
    site: Site, text: str, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    (site.path / "torchrelay.yaml").write_text(text)
    printed = refused(site, "--data=data", *arguments, XDG_CONFIG_HOME=str(site.path), **variables)
    assert re.search(message, printed)


def refused(site: Site, *arguments: str, **environment: str) -> str:
    before = sorted(site.path.rglob("*"))
    done = site.hpc("submit", *arguments, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(site.path.rglob("*")) == before
    assert site.slurm("squeue", "--noheader", "--me", "--states=PENDING,RUNNING") == ""
    return done.stderr


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes=5"], r"--nodes is 5, but partition gpu has 4: use --nodes 4 or fewer"),
        (["--nodes=0"], r"--nodes is '0': use a number"),
        (["--gpus-per-node=5"], r"--gpus-per-node is 5, but partition gpu has 4 per node: use --gpus-per-node 4"),
        (["--partition=gpux"], r"--partition 'gpux' does not exist: use --partition with one of gpu, urgent"),
        (["--time=2d"], r"--time is 2d, but partition gpu allows 1-00:00:00: use --time 1-00:00:00 or less"),
        (["--time=soon"], r"--time is 'soon': use a duration such as 90m"),
        (["--cpus-per-gpu=99"], r"--cpus-per-gpu is 99.*use --cpus-per-gpu 8 or fewer"),
        (["--data=nowhere"], r"--data is .*/nowhere, which does not exist: give a directory, fashion-mnist or digits"),
        (["--data=empty"], r"--data is .*/empty, but there are no images"),
        (["--data=text"], r"--data is .*/text, but there are no images"),
        (["--data=file"], r"--data is .*/file, which is not a directory"),
        (["--data=/tmp/torchrelay-test-data"], r"--data /tmp/.* is on this node's own disk"),
        (["--model=resnet51"], r"--model is 'resnet51', which is not known: did you mean .*resnet50"),
        (["--nodes=2", "--gpus-per-node=4", "--batch-size=7"], r"--batch-size is 7, too small for the 8 ranks"),
        (["--batch-size=0"], r"--batch-size is 0: use 1 or more"),
        (["--lr=fast"], r"--lr.*'fast'"),
        (["--epochs=-1"], r"--epochs is -1"),
        (["-N5"], r"--nodes is 5, but partition gpu has 4"),
        (["-N", "2", "-p", "gpux"], r"--partition 'gpux' does not exist"),
        (["-t2d"], r"--time is 2d, but partition gpu allows"),
        (["-n", "8"], r"there is no flag -n: use --nodes and --gpus-per-node instead"),
        (["-x", "gpu01"], r"there is no flag -x: use --exclude$"),
        (["--gres=gpu:4"], r"there is no flag --gres: use --gpus-per-node 4 or a100:4 for GPUs"),
        (["--mail-type", "END"], r"there is no flag --mail-type: use --sbatch mail-type=VALUE"),
        (["--mem-per-gpu=8G"], r"there is no flag --mem-per-gpu: use --sbatch mem-per-gpu=VALUE"),
        (["--exclusive"], r"there is no flag --exclusive: use --sbatch exclusive$"),
        (["--node", "2"], r"there is no flag --node: did you mean --nodes\?"),
        (["--nodez", "2"], r"there is no flag --nodez: did you mean --nodes\?"),
        (["--name=a/b"], r"--name 'a/b': .*Try --name a-b"),
        (["--name=a\nb"], r"--name 'a\\nb': it holds a newline"),
        (["--name=.."], r"--name '\.\.'"),
        (["--name="], r"--name ''"),
        (["--name=taken"], r"run 'taken' exists already in runs: choose another --name"),
        (["--runs-dir=/tmp/runs"], r"--runs-dir /tmp/runs is on this node's own disk"),
        (["--runs-dir=file"], r"--runs-dir file: .* is no directory"),
        (["--runs-dir=file/x"], r"--runs-dir file/x: .* is no directory"),
        (["--stage-timeout=1s"], r"--stage-timeout is 1s: use 10s or more"),
        (["--runs-dir=a%j"], r"Slurm replaces %"),
        (["--config=unknown.yaml"], r"--config unknown.yaml: there is no flag 'batch_sise': did you mean batch-size"),
        (["--config=nested.yaml"], r"--config nested.yaml: there is no flag 'train'"),
        (["--config=list.yaml"], r"--config list.yaml is no mapping"),
        (["--config=broken.yaml"], r"--config broken.yaml cannot be read"),
        (["--config=none.yaml"], r"--config none.yaml cannot be read"),
        (["--config=type.yaml"], r"--epochs.*'many'"),
        (["--sbatch=nodes=3"], r"--sbatch nodes: use --nodes instead"),
        (["--sbatch=array=0-3"], r"--sbatch array: job arrays are not supported: submit one run per setting"),
        (
            ["--sbatch=hetjob"],
            r"--sbatch hetjob: heterogeneous jobs are not supported: submit one run, or one per kind",
        ),
        (["--stage-dir=$(pwd)"], r"--stage-dir is '\$\(pwd\)': write variables as \$NAME or \$\{NAME\}"),
        (["--gpus-per-node=a100:2"], r"partition gpu has 4 without a type per node: use --gpus-per-node 4 or fewer"),
        (["--sbatch=requeue"], r"--sbatch requeue: runs are always requeued: leave it out"),
        (["--sbatch=mail-type"], r"sbatch refused the job: .*mail-type"),
        (["--sbatch=mem-bind=nonsense"], r"sbatch refused the job: .*mem-bind"),
        (["--constraint=nosuchfeature", "--runs-dir=new/runs"], r"sbatch refused the job: .*[Ff]eature"),
        (["--cluster=cloud"], r"invalid choice 'cloud'"),
        (["--", "nowhere.py"], r"script 'nowhere.py' does not exist"),
        (["--"], r"--"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(site: Site, arguments: list[str], message: str) -> None:
    given = {argument.partition("=")[0] for argument in arguments}
    data = [] if given & {"--data", "--"} else ["--data=data"]
    assert re.search(message, refused(site, *data, *arguments))


# sbatch's own refusals, of which --dry-run hears from `sbatch --test-only`.
REFUSALS = [
    ("--constraint=a100", r"sbatch refused the job: Invalid feature specification$"),
    ("--exclude=gpu99", r"sbatch refused the job: Invalid node name specified$"),
    ("--mem=640G", r"sbatch refused the job: .*Requested node configuration is not available"),
    ("--sbatch=foo=bar", r"sbatch refused the job: unrecognized option '--foo=bar'$"),
]


@pytest.mark.slurm
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)], ids=["submit", "dry-run"])
@pytest.mark.parametrize(("flag", "message"), REFUSALS)
def test_what_sbatch_refuses(site: Site, flag: str, message: str, dry_run: tuple[str, ...]) -> None:
    assert re.search(message, refused(site, "--data=data", flag, *dry_run), re.MULTILINE)


@pytest.fixture
def volume(site: Site) -> Iterator[Path]:
    with mounted_volume(site.path / "volume", "size=1m") as path:
        yield path


@pytest.mark.slurm
@pytest.mark.usefixtures("volume")
def test_full_runs_directory(site: Site) -> None:
    assert "volume: its file system is full" in refused(site, "--data=data", "--runs-dir=volume")


@pytest.mark.slurm
def test_read_only_runs_directory(site: Site, volume: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro,size=200m", str(volume)], check=True)
    assert re.search("volume.* not writable", refused(site, "--data=data", "--runs-dir=volume/new"))


@pytest.mark.slurm
def test_controller_that_is_down(site: Site) -> None:
    configuration = Path(site.slurm_conf).read_text()
    dead = re.sub(r"(?m)^SlurmctldPort=.*$", "SlurmctldPort=1", configuration)
    assert dead != configuration
    (site.path / "dead.conf").write_text(dead)
    line = refused(site, "--data=data", SLURM_CONF=str(site.path / "dead.conf"))
    assert "Slurm does not answer" in line
    assert "--cluster local" in line


def test_no_slurm(tmp_path: Path) -> None:
    tiny_data(tmp_path / "data")
    here = Site(tmp_path, "/nonexistent")
    done = here.hpc("submit", "--cluster=slurm", "--data=data", PATH="/nonexistent")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no Slurm here" in done.stderr
    assert not (tmp_path / "runs").exists()


def wait_for_nodes(site: Site) -> None:
    """Wait until all nodes answer Slurm, as they do not at once after a change of their state."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while "*" in (states := site.slurm("sinfo", "--noheader", "--Node", "--format=%T")):
        assert time.monotonic() < deadline, states
        time.sleep(0.3)


@pytest.mark.slurm
def test_dry_run_prints_the_script_and_leaves_nothing(site: Site) -> None:
    wait_for_nodes(site)
    before = sorted(site.path.rglob("*"))
    done = site.hpc("submit", "--data=data", "--nodes=2", "--gpus-per-node=4", "--dry-run", "--name=it's $dry")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in ("--nodes=2", "--gpus-per-node=4", "--cpus-per-task=8", "--requeue", "--partition=gpu", "--time=60"):
        assert f"#SBATCH {line}" in lines
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert re.fullmatch(r"hpc submit: Slurm expects to start it at \S+ on gpu\[01-02\]\n", done.stderr)
    assert sorted(site.path.rglob("*")) == before


@pytest.mark.slurm
def test_dry_run_on_a_cluster_whose_nodes_are_out_of_service(site: Site) -> None:
    """sbatch would queue the job, though `sbatch --test-only` refuses it."""
    site.slurm("scontrol", "update", "NodeName=gpu[01-03]", "State=drain", "Reason=test")
    try:
        done = site.hpc("submit", "--data=data", "--nodes=2", "--dry-run", "--json")
    finally:
        site.slurm("scontrol", "update", "NodeName=gpu[01-03]", "State=resume")
        wait_for_nodes(site)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["expected_start"] is None
    assert "Slurm does not say when it would start: type sinfo" in done.stderr


@pytest.mark.slurm
def test_flags_override_the_file(site: Site) -> None:
    (site.path / "good.yaml").write_text("nodes: 2\ngpus_per_node: 4\ntime: 3h\ndata: data\nsbatch: [comment=a b]\n")
    done = site.hpc("submit", "--config=good.yaml", "--nodes=3", "--dry-run")
    assert done.returncode == 0, done.stderr
    for line in ("--nodes=3", "--gpus-per-node=4", "--time=180", "--comment='a b'"):
        assert f"#SBATCH {line}" in done.stdout.splitlines()


def test_unknown_verbs_and_runs_are_refused_in_one_line(tmp_path: Path) -> None:
    here = Site(tmp_path, "/nonexistent")
    for arguments in (["statsu"], ["status", "nope"], ["logs", "nope"], ["cancel", "nope"], ["cancel"]):
        done = here.hpc(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr.count("\n") == 1, done.stderr


def test_unreadable_runs_in_a_shared_directory_are_skipped(shared: Path) -> None:
    theirs = shared / "runs" / "theirs"
    theirs.mkdir(parents=True)
    theirs.chmod(0)
    program = (
        "import os, sys\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "from hpc.status.__main__ import main; sys.exit(main(['--json']))"
    )
    done = Site(shared, "/nonexistent").type(sys.executable, "-c", program)
    theirs.chmod(0o700)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
