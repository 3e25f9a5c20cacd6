"""`hpc evaluate` without Slurm: the model of a run and a checkpoint, on one and on several ranks."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import SHORT_LOCAL_CONSTANT_LR, Run, Site, refused, site_without_slurm, submit_and_wait
from support.events import script_spec
from support.reported_runs import pending_run
from support.staging_nodes import contents
from support.trainings import make_folder

from hpc.base.files import read_json_lines
from hpc.run.rundir import RunDir

pytestmark = pytest.mark.timeout(400)
_COUNTED = ("test_accuracy", "test_top5_accuracy", "test_loss", "test_correct", "test_total")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_without_slurm() as site:
        yield site


@pytest.fixture(scope="module")
def source(site: Site) -> Run:
    """A complete training of 2 epochs on one rank, with a moving average; all its checkpoints are left."""
    return submit_and_wait(
        site, *SHORT_LOCAL_CONSTANT_LR, "--name=source", "--epochs=2", "--keep-checkpoints=8", "--ema-decay=0.9"
    )


def evaluate(site: Site, *arguments: str) -> tuple[RunDir, dict[str, Any]]:
    """Evaluate, wait, and read the result."""
    done = site.hpc("evaluate", *arguments, "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(Path(json.loads(done.stdout)["run_dir"]))
    return run, json.loads(run.final_result.read_text())


def counted(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in _COUNTED}


def test_three_ranks_count_what_the_test_of_the_training_did_and_change_nothing(site: Site, source: Run) -> None:
    before = contents(source.directory.path)
    run, result = evaluate(site, "source", "--checkpoint=last", "--gpus-per-node=3")
    assert result["world_size"] == 3
    assert counted(result) == counted(json.loads(source.directory.final_result.read_text()))
    for name in ("confusion.csv", "classes.csv"):
        assert (run.final / name).read_bytes() == (source.directory.final / name).read_bytes()
    assert not list(run.final.glob("*.safetensors"))
    assert contents(source.directory.path) == before


@pytest.mark.slow
def test_checkpoint_of_a_step_is_what_the_validation_after_that_step_saw(site: Site, source: Run) -> None:
    """With the weights of the moving average, as every validation."""
    _, result = evaluate(site, "source", "--checkpoint=4", "--split=val")
    lines = read_json_lines(source.directory.eval_metrics)
    seen = next(line for line in lines if line["split"] == "val" and line["step"] == 4)
    assert (result["test_correct"], result["test_total"]) == (seen["correct"], seen["total"])
    assert result["test_loss"] == pytest.approx(seen["loss"], abs=1e-6)
    assert (result["evaluation"]["step"], result["split"]) == (4, "val")


@pytest.mark.slow
def test_shards_of_a_checkpoint_are_evaluated_on_images_of_some_of_the_classes(site: Site) -> None:
    """A checkpoint that two ranks have written (FSDP), on three ranks, on data without a test set."""
    make_folder(site.path / "folder")
    shutil.rmtree(make_folder(site.path / "some", ("train",)) / "train" / "green")
    flags = ("--cluster=local", "--nodes=1", "--cpus-per-gpu=1", "--gpus-per-node=2", "--data=folder")
    trained = (*flags, "--strategy=fsdp", "--image-size=32", "--batch-size=18", "--epochs=2", "--name=sharded")
    sharded = submit_and_wait(site, *trained)
    first = min(sharded.directory.checkpoints.glob("step-*"))
    run, result = evaluate(site, "sharded", f"--checkpoint={int(first.name[5:])}", "--split=val", "--gpus-per-node=3")
    assert len(list(run.model.glob("state-*-of-00002.safetensors"))) == 2
    seen = next(line for line in read_json_lines(sharded.directory.eval_metrics) if line["split"] == "val")
    assert (result["test_correct"], result["test_total"]) == (seen["correct"], seen["total"])
    assert result["test_loss"] == pytest.approx(seen["loss"], abs=1e-5)
    _, some = evaluate(site, "sharded", "--checkpoint=last", "--data=some", "--name=some-classes")
    assert (some["test_total"], some["classes"]) == (18, ["blue sky", "green", "red"])
    assert some["evaluation"]["source"] == str(sharded.directory.path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no run is named: type hpc evaluate NAME"),
        (("sourc",), "there is no run 'sourc': existing runs: source"),
        (("source", "--checkpoint=newest"), "--checkpoint is 'newest': use best, last, or the step of a checkpoint"),
        (("source", "--checkpoint=99"), "run source has no checkpoint of step 99: it has 8"),
        (("source", "--data=nowhere"), "nowhere, which does not exist"),
    ],
)
def test_wrong_command_lines_of_an_evaluation(site: Site, source: Run, arguments: tuple[str, ...], says: str) -> None:
    before = sorted(path.name for path in source.directory.path.parent.iterdir())
    assert says in refused(site, "evaluate", *arguments)
    assert sorted(path.name for path in source.directory.path.parent.iterdir()) == before


def test_an_evaluation_has_a_report_and_is_not_evaluated_forked_or_resumed(site: Site, source: Run) -> None:
    done = site.hpc("evaluate", "source", "--name=once", "--wait")
    assert done.stdout.startswith("started run once on this machine"), done.stdout + done.stderr
    once = RunDir(source.directory.path.with_name("once"))
    assert site.hpc("report", "once").returncode == 0
    page = once.report.read_text()
    for part in (str(source.directory.path), "of the part ", "Confusion matrix"):
        assert part in page
    assert f"run once is itself an evaluation: evaluate {source.directory.path}" in refused(site, "evaluate", "once")
    assert "run once is an evaluation" in refused(site, "fork", "once", "--name=again")
    assert "run once is a complete evaluation" in refused(site, "resume", "once")
    pending_run(site.path / "runs" / "mine", script_spec("mine.py", name="mine"))
    assert "run mine runs mine.py, and only that script knows its model" in refused(site, "evaluate", "mine")
