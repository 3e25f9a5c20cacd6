"""`hpc fork` without Slurm: a new run goes on from another one's newest checkpoint that is intact."""

import json
import shutil
from collections.abc import Iterator

import pytest
from support.cluster import (
    SHORT_LOCAL,
    SHORT_LOCAL_CONSTANT_LR,
    Run,
    Site,
    add_script,
    assert_equal,
    refused,
    site_without_slurm,
    submit_and_wait,
)

from hpc.core.files import read_json_lines
from training.checkpoint.storage import list_checkpoints

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_without_slurm() as site:
        yield site


@pytest.fixture(scope="module")
def parent(site: Site) -> Run:
    """A complete training of 2 epochs, of which the last two checkpoints are left: those of steps 7 and 8."""
    return submit_and_wait(site, *SHORT_LOCAL_CONSTANT_LR, "--name=parent", "--epochs=2")


def files_of(run: Run) -> dict[str, bytes]:
    """All files of a run, by their paths in it."""
    path = run.directory.path
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no run is named: type hpc fork NAME --name NEW"),
        (("parent",), "the new run has no name: type hpc fork parent --name NEW"),
        (("--lr", "0.1", "parents", "--name=x"), "there is no run 'parents': existing runs: parent"),
        (("parent", "--name=x"), "--epochs is 2, and step-00000008 of run parent is after epoch 2: use --epochs 3 or"),
        (("parent", "--name=x", "--batch-size=8"), "--batch-size cannot change in a training that has begun"),
        (("parent", "--name=x", "--weights=a.pth"), "--weights cannot change in a training that has begun"),
        (("parent", "--name=x", "--recipe=cifar"), "--recipe is for new trainings"),
        (("parent", "--name=x", "--learning-rate=1"), "there is no flag --learning-rate: use --lr"),
        (("parent", "--name=x", "--lr=much"), "much"),
        (("parent", "--name=parent", "--epochs=3"), "exists already"),
    ],
)
def test_wrong_command_lines_say_what_to_type(site: Site, parent: Run, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(site, "fork", *arguments)
    assert [path.name for path in (site.path / "runs").glob("[!.]*")] == [parent.directory.name]


def test_fork_goes_on_from_the_newest_checkpoint_that_is_intact(site: Site, parent: Run) -> None:
    """With other flags, and without changing anything in the other run."""
    newest, before_it = list_checkpoints(parent.directory.checkpoints)
    damaged = newest / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = files_of(parent)
    arguments = ("parent", "--name=low", "--epochs=3", "--lr-scheduler=step", "--lr-step-epochs=1", "--lr=0.01")
    done = site.hpc("fork", *arguments, "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    path = site.path / "runs" / "low"
    spec = json.loads((path / "spec.json").read_text())
    assert spec["forked_from"] == str(before_it)
    assert (spec["train"]["batch_size"], spec["train"]["lr"]) == (64, 0.01), "what was not typed is the other run's"
    lines = {line["step"]: line for line in read_json_lines(path / "metrics" / "train.jsonl")}
    assert sorted(lines) == list(range(1, 13))
    assert [lines[step]["attempt"] for step in (7, 8)] == [0, 1]
    assert lines[12]["lr"] == pytest.approx(0.0001), "the new schedule, at its place"
    assert json.loads(done.stdout)["status"]["goodput"] < 1
    assert files_of(parent) == before


def test_fork_without_other_flags_has_the_bits_of_one_training(site: Site) -> None:
    whole = submit_and_wait(site, *SHORT_LOCAL, "--name=whole", "--epochs=2", "--keep-checkpoints=8")
    for checkpoint in list_checkpoints(whole.directory.checkpoints)[:3]:
        shutil.move(checkpoint, site.path)
    fork = site.hpc("fork", "whole", "--name=same", "--wait")
    assert fork.returncode == 0, fork.stdout + fork.stderr
    assert "after step 5" not in fork.stderr
    for checkpoint in site.path.glob("step-*"):
        shutil.move(checkpoint, whole.directory.checkpoints)
    same = Run(site, type(whole.directory)(site.path / "runs" / "same"), "")
    assert [event["step"] for event in same.events("train_started")] == [5]
    assert_equal(whole.directory, same.directory)


def test_own_script_is_not_forked(site: Site) -> None:
    add_script(site, "mine.py", "")
    submit_and_wait(site, "--cluster=local", "--nodes=1", "--gpus-per-node=1", "--name=mine", "--", "mine.py")
    assert "run mine runs mine.py, which keeps its own checkpoints" in refused(site, "fork", "mine", "--name=x")
