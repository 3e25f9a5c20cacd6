"""The Python API, as a script or a notebook uses it: on this machine, without Slurm."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.cluster import Site

import hpc
from hpc.base.files import append_json_line

pytestmark = pytest.mark.timeout(400)
LOCAL: dict[str, Any] = {"cluster": "local", "gpus_per_node": 1, "cpus_per_gpu": 1}
TRAINS: dict[str, Any] = {"batch_size": 64, "log_every": 1, "checkpoint_every": "1", "lr_scheduler": "constant"}


@pytest.fixture(autouse=True)
def _in_the_site(local_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(local_site.path)


@pytest.fixture(scope="module")
def trained(local_site: Site) -> hpc.Run:
    """A complete training of 2 epochs, 4 steps each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(local_site.path)
        run = hpc.submit(hpc.TrainingRun(name="pets", data="data", epochs=2, **LOCAL, **TRAINS, val_split=0.2))
        assert run.wait(timeout_seconds=300)["state"] == "completed"
    return run


def test_training_is_submitted_waited_for_and_read(local_site: Site, trained: hpc.Run) -> None:
    assert (trained.name, trained.directory) == ("pets", local_site.path / "runs/pets")
    assert list(trained.metrics()["step"]) == list(range(1, 9))
    assert set(trained.metrics("eval")["split"]) == {"val", "test"}
    assert trained.metrics("gpu").empty
    for line in ({"loss": 1}, {"step": 2}, {"step": None}, {"step": 1}):
        append_json_line(trained.directory / "metrics" / "own.jsonl", line)
    assert list(trained.metrics("own")["step"]) == [1, 2]
    assert "epoch 2" in trained.logs(rank=0)
    assert trained.report().read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_training_is_trained_longer_and_forked(trained: hpc.Run) -> None:
    trained.resume(epochs=3)
    assert trained.wait(timeout_seconds=300)["step"] == 12
    low = trained.fork("low", lr=0.001, epochs=4)
    assert (low.wait(timeout_seconds=300)["state"], max(low.metrics()["step"])) == ("completed", 16)
    with pytest.raises(hpc.UserError, match=r"--lr .* hpc fork"):
        trained.resume(lr=1.0)


def test_runs_are_found(trained: hpc.Run) -> None:
    (found,) = [run for run in hpc.runs() if run.name == trained.name]
    assert found.directory == hpc.find_run("pets").directory
    with pytest.raises(hpc.UserError, match=r"existing runs: .*pets"):
        hpc.find_run("pet")


def test_script_is_submitted_and_cancelled(local_site: Site) -> None:
    (local_site.path / "waits.py").write_text(
        "import sys, time\nprint('began', sys.argv[1:], flush=True)\ntime.sleep(600)\n"
    )
    run = hpc.submit(
        hpc.ScriptRun(command="waits.py 'a b' --c", in_place=True, name="waits", grace_period="1s", **LOCAL)
    )
    with pytest.raises(TimeoutError, match="run waits is"):
        run.wait(timeout_seconds=0.1)
    while "began ['a b', '--c']" not in run.logs(rank=0):
        assert run.status()["state"] in {"pending", "running"}, run.logs()
    run.cancel(final=True)
    assert run.wait(timeout_seconds=60)["state"] == "cancelled"
    with pytest.raises(hpc.UserError, match="cancelled with --final"):
        run.resume()


def test_wrong_flags_are_refused_as_by_the_verb_and_leave_nothing() -> None:
    before = sorted(Path().glob("runs/*"))
    for wrong, says in (
        ({"nodes": 0}, "--nodes is '0'"),
        ({"model": "resnet"}, "resnet"),
        ({"mem": "64"}, "64G"),
        ({"epochs": "many"}, "--epochs is 'many': expected a whole number"),
    ):
        with pytest.raises(hpc.UserError, match=says):
            hpc.submit(hpc.TrainingRun(**{"data": "data", **LOCAL, **wrong}))
    with pytest.raises(TypeError, match="epoch"):
        hpc.TrainingRun(epoch=3)  # type: ignore[call-arg]
    assert sorted(Path().glob("runs/*")) == before


def test_what_is_not_given_is_the_users_default(local_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (local_site.path / "config").mkdir()
    (local_site.path / "config/torchrelay.yaml").write_text("model: of-the-user\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(local_site.path / "config"))
    with pytest.raises(hpc.UserError, match="--model is 'of-the-user'"):
        hpc.submit(hpc.TrainingRun(data="data", **LOCAL))
    with pytest.raises(hpc.UserError, match="--model is 'given'"):
        hpc.submit(hpc.TrainingRun(data="data", model="given", **LOCAL))


def test_names_of_the_api_are_no_packages() -> None:
    for package in pkgutil.iter_modules(hpc.__path__):
        if package.ispkg:
            importlib.import_module(f"hpc.{package.name}")
    assert not any(isinstance(getattr(hpc, name), ModuleType) for name in hpc.__all__)


def test_import_is_light() -> None:
    code = "import sys, hpc; hpc.runs('none'); print({'torch', 'pandas', 'bokeh', 'wandb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
