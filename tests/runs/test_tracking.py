"""Runs that are interrupted stay one run at their trackers."""

import pytest
from mlflow.entities import ViewType
from support.cluster import TINY_BATCH, TWO_NODES, Run, Site, add_script
from support.trackers import mlflow_environment, mlflow_runs, wandb_records, wandb_rows, wandb_runs

from hpc.run.spec import RunSpec

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
THREE_EPOCHS = ("--data=data", *TWO_NODES, *TINY_BATCH, "--epochs=3", "--log-every=1", "--checkpoint-every=5")
# As its user would write it for one attempt; the first one waits to be interrupted.
TRACKS_ITSELF = """
import pathlib, sys, time
import mlflow, wandb
begun = pathlib.Path(sys.argv[1])
is_first = not begun.exists()
wandb.init(project="own")
mlflow.start_run()
mlflow.log_metric("x", 1, step=int(is_first))
wandb.log({"x": 1})
begun.touch()
time.sleep(600 if is_first else 0)
mlflow.end_run()
"""


def requeue(run: Run) -> None:
    run.site.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_next_job()
    run.wait_for_state("completed")


def test_requeued_training_is_one_run_with_each_step_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**mlflow_environment(site.path), "WANDB_MODE": "offline"}
    run = site.submit(*THREE_EPOCHS, "--nodes=1", "--tracker=mlflow", "--tracker=wandb", "--name=pets", **environment)
    run.wait_for_steps(20)
    requeue(run)
    assert run.attempts_logged() == [1, 2]
    client, (kept,) = mlflow_runs(site.path, monkeypatch)
    assert [each.step for each in client.get_metric_history(kept.info.run_id, "train/loss")] == run.steps()
    assert (kept.info.run_id, kept.info.status) == (RunSpec.load(run.directory).mlflow_run, "FINISHED")
    (directory,) = wandb_runs(run.directory.tracking)
    assert [row["step"] for row in wandb_rows(directory) if "train/loss" in row] == run.steps()
    assert [(one["tracker"], one["problem"]) for one in run.status()["trackers"]] == [("mlflow", None), ("wandb", None)]


def test_requeued_script_continues_its_own_runs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    add_script(site, "own.py", TRACKS_ITSELF)
    environment = {**mlflow_environment(site.path), "WANDB_MODE": "offline"}
    begun = site.path / "begun"
    run = site.submit("--gpus-per-node=1", "--tracker=mlflow", "--name=own", "--", "own.py", str(begun), **environment)
    run.wait("the start", begun.exists)
    requeue(run)
    client, (kept,) = mlflow_runs(site.path, monkeypatch)
    assert sorted(each.step for each in client.get_metric_history(kept.info.run_id, "x")) == [0, 1]
    own_id = f"own-{RunSpec.load(run.directory).id}"
    first, second = wandb_runs(run.directory.path)
    assert [directory.name.partition("-own")[1:] for directory in (first, second)] == [("-own", own_id[3:])] * 2
    # Of the first, which was killed, W&B may have written nothing yet.
    (began,) = [record.run for record in wandb_records(second) if record.HasField("run")]
    assert (began.run_id, began.display_name, began.project) == (own_id, "own", "own")


def test_run_that_sbatch_refuses_is_deleted_at_mlflow(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    done = site.hpc("submit", "--tracker=mlflow", "--constraint=nope", *THREE_EPOCHS, **mlflow_environment(site.path))
    assert (done.returncode, "Invalid feature" in done.stderr) == (2, True), done.stderr
    client, left = mlflow_runs(site.path, monkeypatch)
    experiment = client.get_experiment_by_name("torchrelay").experiment_id
    assert (left, len(client.search_runs([experiment], run_view_type=ViewType.DELETED_ONLY))) == ([], 1)
