"""`hpc fork` and `hpc resume` without Slurm: what they refuse and what they say to type; trainings that go on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import SHORT_LOCAL, Run, Site, add_script, assert_equal, refused, submit_and_wait
from support.events import attempt_ended, claimed, recorded_run, write_events
from support.fake_slurm import queueing_site
from support.staging_nodes import contents
from torchrelay.checkpoint_files import list_checkpoints

from hpc.base.files import append_json_line, read_json_lines
from hpc.programs.program_kinds import program_of_run
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from training.config.classifier_program import ClassifierFlags
from training.config.train_config import TrainConfig

pytestmark = pytest.mark.timeout(400)
TRAINS = (*SHORT_LOCAL, "--lr-scheduler=step", "--lr-step-epochs=1", "--lr-gamma=0.7", "--keep-checkpoints=8")


@pytest.fixture(scope="module")
def complete(local_site: Site) -> Run:
    """A complete training of 2 epochs with the checkpoints of all 8 steps; tests that change it take a copy."""
    return submit_and_wait(local_site, *TRAINS, "--name=complete", "--epochs=2")


def training_of(spec: RunSpec) -> TrainConfig:
    flags = program_of_run(spec)
    assert isinstance(flags, ClassifierFlags)
    return flags.train


def copy_of(run: Run, name: str) -> RunDir:
    return RunDir(shutil.copytree(run.directory.path, run.directory.path.with_name(name)))


@pytest.mark.parametrize(
    ("verb", "words", "says"),
    [
        ("resume", "--epochs 4", "type hpc resume NAME"),
        ("resume", "nope --epochs 4", "there is no run 'nope'"),
        ("resume", "complete", "run complete is complete: to train longer, give more --epochs"),
        ("resume", "complete --epochs=1", "--epochs is 1, but run complete has been in epoch 2: use 2 or more"),
        ("resume", "complete --lr 0.1", "type hpc fork complete --name NEW --lr ..."),
        ("resume", "complete --batch-size=32", "--batch-size cannot change in a training that has begun: type hpc sub"),
        ("resume", "complete --setup=true --epochs=4", "--cluster local has no batch script"),
        ("fork", "", "no run is named: type hpc fork NAME"),
        ("fork", "nope --name=x", "there is no run 'nope': existing runs: "),
        ("fork", "complete", "the new run has no name: type hpc fork complete --name NEW"),
        (
            "fork",
            "complete --name=x",
            "--epochs is 2, but step-00000008 of run complete is after epoch 2: use --epochs 3",
        ),
        ("fork", "complete --name=x --batch-size=8", "--batch-size cannot change in a training that has begun"),
        ("fork", "complete --name=x --recipe=cifar", "--recipe is only for new trainings"),
        ("fork", "complete --name=complete --epochs=3", "exists already"),
    ],
)
def test_wrong_command_lines_say_what_to_type(
    local_site: Site, complete: Run, verb: str, words: str, says: str
) -> None:
    before = sorted(complete.directory.path.parent.iterdir())
    assert says in refused(local_site, verb, *words.split())
    assert sorted(complete.directory.path.parent.iterdir()) == before
    assert complete.status()["state"] == "completed"
    assert not complete.events("resumed")


SCRIPT = """
import sys
from torchrelay import report, state

with state() as saved:
    print("begins after step", saved.step)
    for saved.step in range(saved.step + 1, int(sys.argv[-1]) + 1):
        report(step=saved.step, loss=1.0)
"""


def test_own_script_is_forked_with_further_arguments_from_what_it_saved(local_site: Site) -> None:
    recorded_run(local_site.path / "runs" / "old", claimed(), attempt_ended(), cluster="local", script=("mine.py",))
    assert "run old has no checkpoint" in refused(local_site, "fork", "old", "--name=x")
    assert "--lr is a flag of another kind of program" in refused(local_site, "fork", "old", "--name=x", "--lr=1")
    add_script(local_site, "mine.py", SCRIPT)
    mine = submit_and_wait(
        local_site, "--cluster=local", "--gpus-per-node=0", "--name=mine", "--", "mine.py", "--steps", "3"
    )
    for line in ({"loss": 1.0}, {"step": None, "loss": 1.0}, {"step": "3"}, {"step": float("nan")}, {"step": 3}):
        append_json_line(mine.directory.train_metrics, line)
        append_json_line(mine.directory.eval_metrics, line)
    mine.directory.best.mkdir()
    (mine.directory.best / "result.json").write_text('{"accuracy": 0.5}')
    done = local_site.hpc("fork", "mine", "--name=further", "--wait", "--json", "--", "--steps", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(local_site.path / "runs" / "further")
    assert RunSpec.load(run).script == ("mine.py", "--steps", "3", "--steps", "7")
    assert [line["step"] for line in read_json_lines(run.train_metrics)] == [1, 2, 3, 3, 4, 5, 6, 7]
    assert [line["step"] for line in read_json_lines(run.eval_metrics)] == [3]
    assert "begins after step 3" in run.rank_log(1, 0).read_text()
    assert mine.status()["step"] == 3


def test_fork_goes_on_from_the_newest_checkpoint_that_is_intact(local_site: Site, complete: Run) -> None:
    """With other flags, and without changing anything in the other run."""
    original = copy_of(complete, "damaged")
    newest, before_it, *_ = list_checkpoints(original.checkpoints)
    damaged = newest / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = contents(original.path)
    arguments = ("damaged", "--name=low", "--epochs=3", "--lr-gamma=0.1", "--lr=0.01")
    done = local_site.hpc("fork", *arguments, "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    path = local_site.path / "runs" / "low"
    spec = RunSpec.load(RunDir(path))
    assert spec.forked_from == str(before_it)
    train = training_of(spec)
    assert (train.batch_size, train.lr) == (64, 0.01), "what was not typed is the other run's"
    lines = {line["step"]: line for line in read_json_lines(path / "metrics" / "train.jsonl")}
    assert sorted(lines) == list(range(1, 13))
    assert [lines[step]["attempt"] for step in (7, 8)] == [0, 1]
    assert lines[12]["lr"] == pytest.approx(0.0001), "the new schedule, at its place"
    assert json.loads(done.stdout)["status"]["goodput"] < 1
    assert contents(original.path) == before


def test_fork_without_other_flags_has_the_bits_of_one_training(local_site: Site, complete: Run) -> None:
    for checkpoint in list_checkpoints(copy_of(complete, "begun").checkpoints)[:3]:
        shutil.rmtree(checkpoint)
    fork = local_site.hpc("fork", "begun", "--name=same", "--wait")
    assert fork.returncode == 0, fork.stdout + fork.stderr
    assert "after step 5" not in fork.stderr
    same = Run(local_site, RunDir(local_site.path / "runs" / "same"), "")
    assert [event["step"] for event in same.events("train_started")] == [5]
    assert_equal(complete.directory, same.directory)


def test_complete_run_trains_longer_as_if_it_had_been_submitted_so(local_site: Site, complete: Run) -> None:
    whole = submit_and_wait(local_site, *TRAINS, "--name=whole", "--epochs=4")
    copy = copy_of(complete, "longer")
    done = local_site.hpc("resume", "longer", "--epochs", "4", "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["changed"] == {"--epochs": 4}
    assert answer["status"]["state"] == "completed"
    run = Run(local_site, copy, answer["job_id"])
    assert [attempt["cause"] for attempt in answer["status"]["attempts"]] == ["completed", "completed"]
    assert [event["step"] for event in run.events("train_started")] == [0, 8]
    assert_equal(whole.directory, run.directory)
    assert json.loads((copy.path / "final-001" / "result.json").read_text())["step"] == 8, "the result before"
    assert "--epochs=2" in json.loads(run.directory.spec.read_text())["program"]["argv"]
    assert training_of(RunSpec.load(run.directory)).epochs == 4
    card = json.loads((run.directory.final / "model.json").read_text())
    assert "--epochs=4" in card["made_from"]["spec"]["program"]["argv"]


def test_failed_script_is_mended_and_resumed(shared: Path) -> None:
    site, slurm = queueing_site(shared)
    add_script(site, "inner/mine.py", "raise SystemExit('no luck')\n")
    inner = replace(site, path=shared / "inner")
    run = inner.submit("--name=mended", "--runs-dir=../runs", "--gpus-per-node=1", "--", "mine.py", **slurm)
    copied = run.directory.code / "inner" / "mine.py"

    def end_job(cause: str, attempt: int) -> None:
        (shared / "queued").unlink()
        write_events(run.directory, claimed(attempt=attempt, job_id="1"), attempt_ended(cause=cause, attempt=attempt))

    end_job("bad_input", 1)
    says = site.hpc("resume", "mended", "--epochs=3", **slurm).stderr
    assert "--epochs cannot change in run mended, which runs mine.py: leave it out, or type hpc fork" in says
    (inner.path / "mine.py").write_text("print('mended')\n")
    again = site.hpc("resume", "mended", **slurm)
    assert again.returncode == 0, again.stderr
    assert "no luck" in copied.read_text()
    end_job("bad_input", 2)
    (shared / "elsewhere").mkdir()
    done = replace(site, path=shared / "elsewhere").hpc("resume", "../runs/mended", "--new-code", **slurm)
    assert done.returncode == 0, done.stderr
    assert copied.read_text() == "print('mended')\n"
    end_job("completed", 3)
    assert "its script ended with exit code 0" in site.hpc("resume", "mended", **slurm).stderr
    assert not list(run.directory.path.glob(".resume-*")), "nothing temporary is left"


def test_cancelled_for_good_is_not_resumed(local_site: Site, complete: Run) -> None:
    for copy in (copy_of(complete, "one"), copy_of(complete, "two")):
        shutil.rmtree(copy.final)
        (copy.events / "attempt-001-end.jsonl").unlink()
    done = local_site.hpc("cancel", "one", "two", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in json.loads(done.stdout)] == ["cancelled", "cancelled"]
    assert local_site.hpc("cancel", "one", "--final").returncode == 0
    assert "was cancelled with --final: continue under a new name with hpc fork one" in refused(
        local_site, "resume", "one"
    )
    assert "there is no run 'none'" in refused(local_site, "cancel", "two", "none")


@pytest.mark.parametrize("flag", ["--after", "--after-ok"])
def test_chain_without_slurm_is_refused(local_site: Site, complete: Run, flag: str) -> None:
    says = refused(local_site, "submit", *SHORT_LOCAL, flag, complete.directory.name)
    assert f"{flag} complete needs Slurm, but this run has --cluster local" in says
    assert "there is no run 'nope'" in refused(local_site, "submit", *SHORT_LOCAL, flag, "nope")
