"""`hpc fork` without Slurm: a new run goes on from another one's newest checkpoint that is intact."""

import json
import shutil

import pytest
from support.cluster import SHORT_LOCAL, Run, Site, assert_equal, refused, submit_and_wait
from support.events import attempt_ended, claimed, recorded_run
from support.staging_nodes import contents

from hpc.base.files import read_json_lines
from hpc.run.rundir import RunDir
from training.relay.checkpoint_files import list_checkpoints

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def parent(local_site: Site) -> Run:
    """A complete training of 2 epochs with the checkpoints of all 8 steps; tests that damage it take a copy."""
    return submit_and_wait(local_site, *SHORT_LOCAL, "--name=parent", "--epochs=2", "--keep-checkpoints=8")


def copy_of(run: Run, name: str) -> RunDir:
    return RunDir(shutil.copytree(run.directory.path, run.directory.path.with_name(name)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no run is named: type hpc fork NAME --name NEW"),
        (("parents", "--name=x"), "there is no run 'parents': existing runs: "),
        (("parent",), "the new run has no name: type hpc fork parent --name NEW"),
        (("parent", "--name=x"), "--epochs is 2, but step-00000008 of run parent is after epoch 2: use --epochs 3 or"),
        (("parent", "--name=x", "--batch-size=8"), "--batch-size cannot change in a training that has begun"),
        (("parent", "--name=x", "--weights=a.pth"), "--weights cannot change in a training that has begun"),
        (("parent", "--name=x", "--recipe=cifar"), "--recipe is only for new trainings"),
        (("parent", "--name=parent", "--epochs=3"), "exists already"),
        (("mine", "--name=x"), "run mine runs mine.py, which keeps its own checkpoints"),
    ],
)
def test_wrong_command_lines_say_what_to_type(
    local_site: Site, parent: Run, arguments: tuple[str, ...], says: str
) -> None:
    mine = local_site.path / "runs" / "mine"
    if not mine.exists():
        recorded_run(mine, claimed(), attempt_ended(), cluster="local", script=("mine.py",))
    before = sorted(parent.directory.path.parent.iterdir())
    assert says in refused(local_site, "fork", *arguments)
    assert sorted(parent.directory.path.parent.iterdir()) == before


def test_fork_goes_on_from_the_newest_checkpoint_that_is_intact(local_site: Site, parent: Run) -> None:
    """With other flags, and without changing anything in the other run."""
    original = copy_of(parent, "damaged")
    newest, before_it, *_ = list_checkpoints(original.checkpoints)
    damaged = newest / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = contents(original.path)
    arguments = ("damaged", "--name=low", "--epochs=3", "--lr-scheduler=step", "--lr-step-epochs=1", "--lr=0.01")
    done = local_site.hpc("fork", *arguments, "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    path = local_site.path / "runs" / "low"
    spec = json.loads((path / "spec.json").read_text())
    assert spec["training"]["forked_from"] == str(before_it)
    train = spec["training"]["train"]
    assert (train["batch_size"], train["lr"]) == (64, 0.01), "what was not typed is the other run's"
    lines = {line["step"]: line for line in read_json_lines(path / "metrics" / "train.jsonl")}
    assert sorted(lines) == list(range(1, 13))
    assert [lines[step]["attempt"] for step in (7, 8)] == [0, 1]
    assert lines[12]["lr"] == pytest.approx(0.0001), "the new schedule, at its place"
    assert json.loads(done.stdout)["status"]["goodput"] < 1
    assert contents(original.path) == before


def test_fork_without_other_flags_has_the_bits_of_one_training(local_site: Site, parent: Run) -> None:
    for checkpoint in list_checkpoints(copy_of(parent, "begun").checkpoints)[:3]:
        shutil.rmtree(checkpoint)
    fork = local_site.hpc("fork", "begun", "--name=same", "--wait")
    assert fork.returncode == 0, fork.stdout + fork.stderr
    assert "after step 5" not in fork.stderr
    same = Run(local_site, RunDir(local_site.path / "runs" / "same"), "")
    assert [event["step"] for event in same.events("train_started")] == [5]
    assert_equal(parent.directory, same.directory)
