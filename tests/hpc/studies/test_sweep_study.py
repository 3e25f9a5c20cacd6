"""`hpc sweep` without Slurm: trials are ordinary runs, and the controller may die at any moment."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from support.cluster import SHORT_LOCAL_CONSTANT_LR, Site, add_script, refused
from support.environments import SITE

from hpc.base.flag_files import read_settings
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.studies.sweep_spec import SweepDir
from hpc.studies.sweep_study import open_study
from hpc.submissions.options import SubmitOptions, completed
from hpc.submissions.plan import plan

pytestmark = pytest.mark.timeout(400)
# As good as its --x is small, but for trial 5; the second step comes when the test says so.
SCORED = """
import json, os, sys, time
from pathlib import Path
x, go = float(sys.argv[2]), Path(sys.argv[3])
metrics = Path(os.environ["TORCHRELAY_RUN_DIR"], "metrics")
metrics.mkdir()
x += 100 * metrics.parts.count("pruned-005")
with open(metrics / "eval.jsonl", "a") as file:
    for step in (1, 2):
        print(json.dumps({"step": step, "split": "val", "accuracy": 1 - x + step / 100}), file=file, flush=True)
        while not go.exists():
            time.sleep(0.1)
"""
# As many bad losses as its argument says, then two good ones.
NOT_FINITE = """
import json, os, sys
from pathlib import Path
metrics = Path(os.environ["TORCHRELAY_RUN_DIR"], "metrics")
metrics.mkdir()
losses = [float("nan"), float("-inf"), float("inf"), 0.5, 0.4][:int(sys.argv[1])]
lines = [json.dumps({"step": step, "split": "val", "loss": loss}) + "\\n" for step, loss in enumerate(losses)]
(metrics / "eval.jsonl").write_text("".join(lines))
"""
LOCAL = ("--cluster=local", "--gpus-per-node=1", "--cpus-per-gpu=1")


@pytest.fixture(scope="module")
def site(local_site: Site) -> Site:
    add_script(local_site, "scored.py", SCORED)
    add_script(local_site, "not_finite.py", NOT_FINITE)
    return local_site


def sweep(site: Site, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = site.hpc("sweep", "--json", *arguments)
    assert done.returncode == code, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_sweep_survives_its_controller_and_finds_the_best(site: Site) -> None:
    go, trials = site.path / "go", site.path / "runs/pets"
    script = ("--", "scored.py", "--x", "{x}", str(go))
    command = (sys.executable, "-m", "hpc", "sweep", "--name=pets", "--param=x=0.3,0.1,0.2", "--sampler=grid")
    with subprocess.Popen([*command, "--parallel=2", *LOCAL, *script], cwd=site.path) as controller:
        while not all((trials / f"pets-00{n}/metrics/eval.jsonl").exists() for n in (0, 1)):
            assert controller.poll() is None
            time.sleep(0.1)
        controller.send_signal(signal.SIGKILL)
    assert not (trials / "pets-002").exists()
    # What the trials run is the code of the start.
    (site.path / "scored.py").write_text("raise SystemExit(1)")
    go.touch()
    try:
        found = sweep(site, "--name=pets")
    finally:
        (site.path / "scored.py").write_text(SCORED)
    values = [one["value"] for one in found["trials"]]
    assert values == [pytest.approx(value) for value in (0.92, 0.82, 0.72)]
    assert [one["params"]["x"] for one in found["trials"]] == ["0.1", "0.2", "0.3"]
    assert {one["state"] for one in found["trials"]} == {"completed"}
    assert found["best"] == found["trials"][0]["run"]
    assert (trials / "best.yaml").read_text().splitlines()[:2] == [
        "# pets-001 of sweep pets: val/accuracy 0.92",
        f"# hpc submit --config {trials}/best.yaml -- scored.py --x 0.1 {go}",
    ]
    assert "best: pets-001 with x=0.1" in site.hpc("sweep", "--name=pets").stdout
    rows = json.loads(site.hpc("status", "pets", "--json").stdout)
    assert [(row["run"], row["state"]) for row in rows] == [(f"pets-00{n}", "completed") for n in range(3)]
    assert site.hpc("report", "pets").stdout.startswith(str(trials / "report/index.html"))


def test_module_of_a_sweep_may_be_in_the_active_environment_alone(site: Site) -> None:
    package = site.path / "env" / SITE / "only_there.py"
    package.parent.mkdir(parents=True)
    package.touch()
    (site.path / "env/bin").mkdir()
    words = ("--name=there", "--param=x=1", *LOCAL, "--", "-m", "only_there")
    says = refused(site, "sweep", *words, VIRTUAL_ENV=str(site.path / "env"))
    assert "the active environment's Python is " in says, "only the first run looks for it"


@pytest.mark.slow
def test_best_training_is_a_file_of_flags(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--epochs=1", "--param=lr=0.05,1e-7", "--sampler=grid", "--parallel=2", "--metric=train/loss")
    found = sweep(site, "--name=train", *SHORT_LOCAL_CONSTANT_LR, *flags)
    assert [one["params"]["lr"] for one in found["trials"]] == ["0.05", "1e-7"]
    monkeypatch.chdir(site.path)
    _, again = plan(completed({"config": "runs/train/best.yaml", "name": "again"}, SubmitOptions))
    trial = RunSpec.load(RunDir(site.path / "runs/train" / found["best"]))
    assert (again.program, again.resources) == (trial.program, trial.resources)


@pytest.mark.slow
def test_values_that_are_not_finite_do_not_count_and_words_that_are_not_utf8_are_escaped(site: Site) -> None:
    script = ("--", "not_finite.py", "{lines}", os.fsdecode(b"caf\xe9\nau lait"))
    flags = ("--param=lines=5,3", "--sampler=grid", "--metric=val/loss", "--parallel=2", *LOCAL)
    found = sweep(site, "--name=finite", *flags, *script)
    assert [(one["value"], one["cause"]) for one in found["trials"]] == [
        (0.4, None), (None, "val/loss is never a finite number"),
    ]  # fmt: skip
    best = site.path / "runs/finite/best.yaml"
    assert best.read_text(encoding="utf-8").splitlines()[1].endswith(r"-- not_finite.py 5 'caf\udce9\nau lait'")
    assert read_settings("--config", best, None)["cluster"] == "local"


@pytest.mark.slow
def test_worse_trials_are_pruned_and_a_cancelled_sweep_starts_no_more(site: Site) -> None:
    go, trials = site.path / "go-pruned", site.path / "runs/pruned"
    go.touch()
    flags = ("--param=x=float:0.1,0.2", "--sampler=random", "--trials=1", "--parallel=1", *LOCAL)
    inner = replace(site, path=site.path / "inner")
    inner.path.mkdir()
    script = ("--", "../scored.py", "--x", "{x}", str(go))
    found = sweep(inner, "--name=pruned", "--runs-dir=../runs", "--in-place", *flags, *script)
    assert [one["state"] for one in found["trials"]] == ["completed"]
    # The pruner compares with five trials.
    study = open_study(SweepDir(trials), SweepDir(trials).load())
    study.add_trials(study.trials * 4)
    go.unlink()
    assert sweep(site, "--name=pruned", "--trials=6")["trials"][-1]["state"] == "pruned"
    command = [sys.executable, "-m", "hpc", "sweep", "--json", "--name=pruned", "--trials=9", "--parallel=1"]
    with subprocess.Popen(command, cwd=site.path, stdout=subprocess.PIPE, text=True) as controller:
        while not (trials / "pruned-006/metrics/eval.jsonl").exists():
            assert controller.poll() is None
            time.sleep(0.1)
        assert site.hpc("cancel", "pruned").returncode == 0
        ended = json.loads(controller.communicate(timeout=120)[0])["trials"]
    states = [one["state"] for one in ended]
    expected = ["other trials were better after the same number of steps", "cancelled"]
    assert [one["cause"] for one in ended[5:]] == expected
    assert (states, (trials / "pruned-007").exists()) == (["completed"] * 5 + ["pruned", "failed"], False)


def test_wrong_command_lines_leave_nothing(site: Site) -> None:
    before = sorted(site.path.glob("runs/*"))
    for arguments, says in (
        (("--param=lr=1,2", *SHORT_LOCAL_CONSTANT_LR), "the sweep has no name: add --name NAME"),
        (("--name=x",), "there is no sweep x in runs: add --param NAME=VALUES to start one"),
        (("--name=x", "--param=lrr=1,2", *SHORT_LOCAL_CONSTANT_LR), "there is no training flag --lrr"),
        (("--name=x", "--param=lr=1,2", "--trials=0", *SHORT_LOCAL_CONSTANT_LR), "--trials is 0"),
        (("--name=x", "--param=model=none,other", *SHORT_LOCAL_CONSTANT_LR), "--model is '"),
    ):
        assert says in refused(site, "sweep", *arguments)
    assert sorted(site.path.glob("runs/*")) == before
