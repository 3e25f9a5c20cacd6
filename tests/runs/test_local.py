"""The same job without Slurm: submitit's local executor, one task per pretended node."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import LONG, SMALL_BATCH, Site, tiny_data
from PIL import Image

from hpc.core import ledger
from training.config.packed_index import read_index

pytestmark = pytest.mark.timeout(400)
LOCAL = "--cluster=local"


@pytest.fixture
def site(shared: Path) -> Iterator[Site]:
    tiny_data(shared / "data")
    here = Site(shared, "/nonexistent")
    yield here
    for run in (shared / "runs").glob("*"):
        assert here.hpc("cancel", str(run)).returncode == 0


def test_two_pretended_nodes_train(site: Site) -> None:
    arguments = ("--data=data", LOCAL, "--nodes=2", "--gpus-per-node=2", *SMALL_BATCH, "--epochs=3")
    done = site.hpc("submit", *arguments, "--wait", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    status = json.loads(done.stdout)["status"]
    assert (status["state"], status["world_size"], status["attempt"]) == ("completed", 4, 1)
    assert status["test_accuracy"] > 0.5
    assert status["steps_lost"] == 0


def test_interrupted_run_requeues_itself_and_can_be_cancelled(site: Site) -> None:
    run = site.submit("--data=data", LOCAL, *LONG)
    run.wait_for_steps(20)
    os.kill(int(run.job_id), signal.SIGTERM)
    run.wait("the second attempt", lambda: 2 in run.attempts_logged())
    run.assert_no_gap()
    first, second = run.status()["attempts"]
    assert first["cause"] == "requeued"
    assert second["first_step"] == first["last_step"]
    assert site.hpc("cancel", str(run.directory.path)).returncode == 0
    assert run.status()["state"] == "cancelled"
    run.wait("the end", lambda: not run.is_alive())
    assert len(run.status()["attempts"]) == 2


def test_own_script_with_its_arguments_and_environment(site: Site) -> None:
    (site.path / "src").mkdir()
    (site.path / "src" / "helper.py").write_text("WORD = 'old'\n")
    (site.path / "src" / "my.py").write_text(
        "import os, sys, helper\n"
        "print(helper.WORD, sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['TORCHRELAY_DATA'], flush=True)\n"
    )
    for command in (("git", "init", "-q"), ("git", "add", "src")):
        assert site.type(*command).returncode == 0
    run = site.submit(LOCAL, "--nodes=2", "--data=data", "--name=own", "--", "src/my.py", "a b", "--x=$HOME")
    (site.path / "src" / "helper.py").write_text("WORD = 'edited after the submission'\n")
    run.wait_for_state("completed")
    for rank in (0, 1):
        word, rest = run.directory.rank_log(1, rank).read_text().splitlines()[-1].split(" ", 1)
        assert word == "old", "the snapshot runs, not the edited file"
        assert rest.startswith("['a b', '--x=$HOME'] 2 /tmp/torchrelay-")


def test_last_words_of_a_rank_reach_no_terminal(site: Site) -> None:
    (site.path / "my.py").write_text("raise SystemExit('\\x1b]0;owned\\x07\\x1b[2J')\n")
    for command in (("git", "init", "-q"), ("git", "add", "my.py")):
        assert site.type(*command).returncode == 0
    waited = site.hpc("submit", LOCAL, "--name=bad", "--nodes=1", "--gpus-per-node=1", "--wait", "--", "my.py")
    assert waited.returncode == 1
    run = site.path / "runs" / "bad"
    [agent_log] = run.joinpath("logs").glob("*_0_log.out")
    printed = [site.hpc(verb, "bad").stdout for verb in ("status", "logs")]
    for text in (waited.stdout + waited.stderr, agent_log.read_text(), *printed):
        assert r"\x1b]0;owned\x07\x1b[2J" in text
        assert "\x1b" not in text


def test_untracked_script_is_refused(site: Site) -> None:
    (site.path / "my.py").write_text("")
    assert site.type("git", "init", "-q").returncode == 0
    done = site.hpc("submit", LOCAL, "--", "my.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "git add my.py" in done.stderr
    assert not (site.path / "runs").exists()


def test_submission_returns_though_the_run_goes_on(site: Site) -> None:
    """A pipe reader must not wait for the run: the controller keeps none of the caller's streams."""
    run = site.submit("--data=data", LOCAL, "--nodes=1", "--gpus-per-node=1", "--epochs=100000", "--log-every=1")
    run.wait_for_steps(1)
    assert run.is_alive()
    followed = site.hpc("logs", run.directory.name, "--rank=0")
    assert followed.stdout.startswith("[1:0] starting")
    run.cancel()


def test_images_are_packed_on_the_node_once(site: Site) -> None:
    for number in range(24):
        directory = site.path / "photos" / f"class-{number % 2}"
        directory.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((48, 40), 60).save(directory / f"{number}.jpg")
    (site.path / "disk").mkdir()
    flags = ("--nodes=1", "--gpus-per-node=1", "--batch-size=8", "--image-size=28", "--stage-dir=disk")
    packed = []
    for name in ("first", "second"):
        done = site.hpc(
            "submit", LOCAL, "--data=photos", "--pack=auto", "--epochs=3", f"--name={name}", *flags, "--wait"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        [event] = [e for e in ledger.read(site.path / "runs" / name / "events") if e["event"] == "packed"]
        packed.append(event)
    assert packed[0]["path"] == packed[1]["path"]
    index = read_index(Path(packed[0]["path"]))
    assert (index.size, sum(part.images for part in index.parts)) == (32, 24)
    copies = json.loads(site.hpc("stage", "--list", "--stage-dir=disk", "--json").stdout)
    assert sorted(copy["files"] for copy in copies) == [3 + 1, 24], "the photographs, and what they were packed into"
    check = site.hpc("stage", "--verify", "--stage-dir=disk")
    assert check.returncode == 0, check.stdout
    few = site.hpc("submit", LOCAL, "--data=photos", "--pack=auto", "--epochs=2", "--dry-run", *flags)
    assert few.returncode == 0, few.stderr
    other = site.hpc("submit", LOCAL, "--data=data", "--pack=on", "--dry-run", *flags)
    assert (other.returncode, "is no image folder" in other.stderr) == (2, True)
