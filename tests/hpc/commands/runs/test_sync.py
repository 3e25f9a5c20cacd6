"""`hpc sync`: metrics reach the real packages of W&B and MLflow, each point once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster import hpc
from support.reported_runs import STEPS, complete, completed_run, running_run
from support.trackers import mlflow_environment, mlflow_runs, wandb_records, wandb_rows, wandb_runs

from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.services.tracking.tracker import run_id

pytestmark = pytest.mark.timeout(300)
LOGGED = STEPS // 2
OFFLINE = {"WANDB_MODE": "offline"}


def sync(run: RunDir, *flags: str, **environment: str) -> dict[str, Any]:
    """The only answer of `hpc sync`."""
    done = hpc("sync", str(run.path), "--json", *flags, **environment)
    (answer,) = json.loads(done.stdout)
    assert done.returncode == int(answer["problem"] is not None), done.stderr
    return dict(answer)


def refusal(run: RunDir, *flags: str, **environment: str) -> str:
    done = hpc("sync", str(run.path), *flags, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr + done.stdout
    return done.stderr


def test_mlflow_gets_each_point_once_though_the_run_is_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, environment = running_run(tmp_path / "pets"), mlflow_environment(tmp_path)
    first = sync(run, "--tracker=mlflow", **environment)
    assert (first["points"], first["problem"]) == (LOGGED + 4, None)
    complete(run)
    assert sync(run, "--tracker=mlflow", **environment)["points"] == 1
    assert sync(run, "--tracker=mlflow", **environment)["points"] == 0
    client, (kept,) = mlflow_runs(tmp_path, monkeypatch)
    losses = client.get_metric_history(kept.info.run_id, "train/loss")
    assert [loss.step for loss in losses] == list(range(2, STEPS + 1, 2))
    assert (kept.info.run_name, kept.info.status) == ("pets", "FINISHED")
    assert (kept.data.metrics["test/accuracy"], kept.data.metrics["val/accuracy"]) == (0.85, 0.9)
    assert (kept.data.params["epochs"], kept.data.params["recipe"]) == ("4", "cifar")


def test_wandb_has_one_whole_run_offline_beside_those_of_the_script(tmp_path: Path) -> None:
    run = completed_run(tmp_path / "pets")
    own = run.path / "wandb" / f"offline-run-20300101_000000-{run_id(RunSpec.load(run))}" / "run-x.wandb"
    own.parent.mkdir(parents=True)
    own.write_text("of the script")
    for _ in range(2):
        assert sync(run, "--tracker=wandb", **OFFLINE)["points"] == LOGGED + 5
    assert own.read_text() == "of the script"
    (directory,) = wandb_runs(run.tracking)
    rows = wandb_rows(directory)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(2, STEPS + 1, 2))
    assert [row["test/accuracy"] for row in rows if "test/accuracy" in row] == [0.85]
    assert rows[0]["_timestamp"] == pytest.approx(1_700_000_011.0)
    (began,) = [record.run for record in wandb_records(directory) if record.HasField("run")]
    assert (began.run_id, began.display_name, began.project) == ("pets", "pets", "torchrelay")
    settings = {item.key: item.value_json for item in began.config.update}
    assert (settings["model"], settings["nodes"]) == ('"small-cnn"', '"2"')


def test_runs_that_are_watched_take_turns(tmp_path: Path) -> None:
    first, second = running_run(tmp_path / "first", loss=3.0), completed_run(tmp_path / "second")
    command = [sys.executable, "-m", "hpc", "sync", first.path, second.path, first.path, "--tracker=wandb", "--watch"]
    with subprocess.Popen(command, env={**os.environ, **OFFLINE}, stdout=subprocess.PIPE, text=True) as watches:
        assert watches.stdout
        assert watches.stdout.readline().startswith(f"second: sent {LOGGED + 5} points")
        assert watches.poll() is None
        complete(first)
        assert watches.stdout.readline().startswith(f"first: sent {LOGGED + 5} points")
    assert watches.returncode == 0
    for run in (first, second):
        (directory,) = wandb_runs(run.tracking)
        (began,) = [record.run for record in wandb_records(directory) if record.HasField("run")]
        lines = [json.loads(line) for line in run.train_metrics.read_text().splitlines()]
        sent = [row["train/loss"] for row in wandb_rows(directory) if "train/loss" in row]
        assert (began.display_name, sent) == (run.name, [line["loss"] for line in lines])


def test_what_is_missing_is_said_before_anything_is_sent_and_a_server_that_does_not_answer(tmp_path: Path) -> None:
    run, nothing = completed_run(tmp_path / "pets"), {"HOME": str(tmp_path), "WANDB_API_KEY": ""}
    assert "run pets was submitted without --tracker: add --tracker wandb" in refusal(run)
    assert "export MLFLOW_TRACKING_URI=http://HOST:5000" in refusal(run, "--tracker=mlflow", MLFLOW_TRACKING_URI="")
    assert "type wandb login, or set WANDB_API_KEY" in refusal(run, "--tracker=wandb", **nothing)
    assert "no run is named: type hpc sync NAME" in hpc("sync").stderr
    unanswered = sync(run, "--tracker=mlflow", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert "MLflow at http://127.0.0.1:9" in unanswered["problem"]


def test_script_finds_the_run_that_its_submission_has_made_at_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("import os\nprint(os.environ['MLFLOW_RUN_ID'], os.environ['WANDB_RUN_ID'])\n")
    flags = ("--cluster=local", "--gpus-per-node=1", "--in-place", "--tracker=mlflow", "--name=a", "--wait")
    done = hpc("submit", *flags, "--", "a.py", cwd=tmp_path, **mlflow_environment(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,), run = mlflow_runs(tmp_path, monkeypatch)[1], RunDir(tmp_path / "runs/a")
    spec = RunSpec.load(run)
    assert (spec.mlflow_run, kept.info.run_name, kept.info.status) == (kept.info.run_id, "a", "FINISHED")
    assert run.rank_log(1, 0).read_text().splitlines()[-1].split() == [kept.info.run_id, f"a-{spec.id}"]
