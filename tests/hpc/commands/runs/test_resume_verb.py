"""`hpc resume` without Slurm: what it refuses and what it says to type; a complete run that trains longer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import SHORT_LOCAL_CONSTANT_LR, Run, Site, add_script, assert_equal, refused, submit_and_wait
from support.events import attempt_ended, claimed, write_events
from support.fake_slurm import queueing_site

from hpc.run.events.resumption import current_spec
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.submit.resumed_run import options_of

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def complete(local_site: Site) -> Run:
    """A complete training of 2 epochs at a constant learning rate."""
    return submit_and_wait(local_site, *SHORT_LOCAL_CONSTANT_LR, "--name=complete", "--epochs=2")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--epochs", "4"), "type hpc resume NAME"),
        (("--epochs", "4", "nope"), "there is no run 'nope'"),
        (("complete",), "run complete is complete: to train longer, give more --epochs"),
        (("complete", "--epochs=1"), "--epochs is 1, but run complete has been in epoch 2: use 2 or more"),
        (("complete", "--lr", "0.1"), "type hpc fork complete --name NEW --lr ..."),
        (("complete", "--batch-size=32"), "--batch-size cannot change in a training that has begun: type hpc submit"),
        (("complete", "--setup=module load cuda", "--epochs=4"), "--cluster local has no batch script"),
    ],
)
def test_wrong_command_lines_say_what_to_type(
    local_site: Site, complete: Run, words: tuple[str, ...], says: str
) -> None:
    assert says in refused(local_site, "resume", *words)
    assert complete.status()["state"] == "completed"
    assert not complete.events("resumed")


def test_epochs_that_change_earlier_learning_rates_are_refused(local_site: Site, complete: Run) -> None:
    run = RunDir(shutil.copytree(complete.directory.path, local_site.path / "runs" / "cosine"))
    spec = json.loads(run.spec.read_text())
    spec["training"]["train"]["lr_scheduler"] = "cosine"
    run.spec.write_text(json.dumps(spec))
    says = refused(local_site, "resume", "cosine", "--epochs=4")
    assert "with --lr-scheduler cosine the learning rate of every step depends on it" in says
    assert "type hpc fork cosine --name NEW --epochs 4" in says
    assert run.final_result.exists()


def test_complete_run_trains_longer_as_if_it_had_been_submitted_so(local_site: Site, complete: Run) -> None:
    whole = submit_and_wait(local_site, *SHORT_LOCAL_CONSTANT_LR, "--name=whole", "--epochs=4")
    copy = local_site.path / "runs" / "longer"
    shutil.copytree(complete.directory.path, copy)
    done = local_site.hpc("resume", "longer", "--epochs", "4", "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["changed"] == {"--epochs": 4}
    assert answer["status"]["state"] == "completed"
    run = Run(local_site, RunDir(copy), answer["job_id"])
    assert [attempt["cause"] for attempt in answer["status"]["attempts"]] == ["completed", "completed"]
    assert [event["step"] for event in run.events("train_started")] == [0, 8]
    assert_equal(whole.directory, run.directory)
    assert json.loads((copy / "final-001" / "result.json").read_text())["step"] == 8, "the result before"
    submitted, now = (json.loads(path.read_text()) for path in (run.directory.spec, current_spec(run.directory)))
    assert [each["training"]["train"]["epochs"] for each in (submitted, now)] == [2, 4]
    card = json.loads((run.directory.final / "model.json").read_text())
    assert card["made_from"]["spec"]["training"]["train"]["epochs"] == 4


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
    assert "--epochs is a flag of the image classifier, but run mended runs mine.py" in says
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
    copies = [local_site.path / "runs" / name for name in ("one", "two")]
    for copy in copies:
        shutil.copytree(complete.directory.path, copy)
        shutil.rmtree(copy / "final")
        (copy / "events" / "attempt-001-end.jsonl").unlink()
    done = local_site.hpc("cancel", "one", "two", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in json.loads(done.stdout)] == ["cancelled", "cancelled"]
    assert local_site.hpc("cancel", "one", "--final").returncode == 0
    assert "was cancelled with --final: continue under a new name with hpc fork one" in refused(
        local_site, "resume", "one"
    )
    assert "there is no run 'none'" in refused(local_site, "cancel", "two", "none")


# --- its parts ---


def test_settings_of_the_run_are_kept_unless_others_are_given(complete: Run) -> None:
    run, spec = {"run": str(complete.directory.path)}, RunSpec.load(complete.directory)
    kept, time = options_of(run), None if spec.has_default_time else spec.resources.time
    assert (kept.recovery, kept.network, kept.resources) == (
        spec.recovery, spec.network, replace(spec.resources, time=time),
    )  # fmt: skip
    other = options_of({**run, "setup": ["c"], "elastic": True, "time": "2h", "epochs": 30})
    assert other.resources == replace(spec.resources, setup=("c",), time="2h")
    assert (other.recovery.elastic, other.train.epochs) == (True, 30)


@pytest.mark.parametrize("flag", ["--after", "--after-ok"])
def test_chain_without_slurm_is_refused(local_site: Site, complete: Run, flag: str) -> None:
    says = refused(local_site, "submit", *SHORT_LOCAL_CONSTANT_LR, flag, complete.directory.name)
    assert f"{flag} complete needs Slurm, but this run has --cluster local" in says
    assert "there is no run 'nope'" in refused(local_site, "submit", *SHORT_LOCAL_CONSTANT_LR, flag, "nope")
