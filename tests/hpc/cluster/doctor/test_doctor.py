"""`hpc doctor` as it is typed: without Slurm, with a recorded one, with one that is silent, and on real nodes."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from support.cluster import Site, hpc
from support.events import resources_of, script_spec
from support.fake_slurm import write_programs
from support.forked_hpc import run_forked
from test_findings import CONFIG, NODE, PARTITIONS

from hpc.base.files import append_json_line
from hpc.cluster.doctor.node_job import NodeJob, read_reports, srun_argv
from hpc.commands.cluster.doctor import DoctorOptions, find_run, measurements_of
from hpc.run.rundir import RunDir
from hpc.run.spec import Network, Resources

ROOT = Path(__file__).parents[4]
ANSWERS = {
    "scontrol": ('case "$*" in\n*partition) cat partitions;;\n*config) cat config;;\n*) exit 1;;\nesac\n'),
    "sbatch": "exit 1\n",
    "sacct": 'echo "Slurm accounting storage is disabled" >&2; exit 1\n',
}
SILENT = "echo 'slurm_load_partitions error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n"


def answer(directory: Path, **answers: str) -> Path:
    """Put executables on a PATH that print what a Slurm has printed."""
    write_programs(directory, **{name: f'cd "$(dirname "$0")"\n{body}' for name, body in answers.items()})
    return directory


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, text in (("config", CONFIG), ("partitions", PARTITIONS)):
        (directory / name).write_text(text)
    return answer(directory, **ANSWERS)


def doctor(cwd: Path, path: Path | str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return hpc("doctor", *arguments, cwd=cwd, SLURM_CONF="/x", PATH=f"{path}:/usr/bin:/bin")


def findings(done: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


def new_run(runs: Path, name: str, save_seconds: float | None = None) -> RunDir:
    run = RunDir(runs / name)
    run.events.mkdir(parents=True)
    script_spec(name=name).save(run)
    age = len(list(runs.iterdir()))
    os.utime(run.spec, (age, age))
    stopped = {"event": "train_stopped", "attempt": 1, "step": 5, "signal": "SIGTERM", "seconds": save_seconds}
    if save_seconds is not None:
        append_json_line(run.events / "x.jsonl", {"time": 1.0, **stopped})
    return run


def test_recorded_cluster(tmp_path: Path, recorded: Path) -> None:
    new_run(tmp_path / "runs", "r", save_seconds=12.0)
    done = doctor(tmp_path, recorded, "--json")
    found = findings(done)
    assert done.returncode == 1, done.stderr
    assert found["preemption"]["severity"] == "cost"
    assert "save of run r took 12.0 s" in found["preemption"]["value"]
    assert found["accounting"]["value"] == "Slurm accounting storage is disabled"
    assert found["SlurmdTimeout"]["severity"] == "note"


def test_notes_are_no_failure_and_are_counted(shared: Path, recorded: Path) -> None:
    done = doctor(shared, recorded)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SlurmdTimeout=300 s" in done.stdout
    assert "AllocNodes" not in done.stdout
    notes = [one for one in findings(doctor(shared, recorded, "--json")).values() if one["severity"] == "note"]
    assert done.stdout.splitlines()[-1].startswith(f"no problems, {len(notes)} notes")


def test_silent_controller_is_one_finding(tmp_path: Path, recorded: Path) -> None:
    answer(recorded, scontrol=SILENT)
    done = doctor(tmp_path, recorded, "--json")
    found = findings(done)
    assert done.returncode == 1
    assert "Unable to contact slurm controller" in found["slurm"]["value"]
    assert set(found) == {"slurm", "runs directory", "torch", "nodes"}


def test_without_slurm_this_machine_is_inspected_and_no_node(tmp_path: Path) -> None:
    without_slurm = {"PATH": "/nonexistent"}
    found = findings(run_forked(["doctor", "--json"], tmp_path, without_slurm))
    assert found["slurm"]["severity"] == "note"
    assert set(found) == {"slurm", "stage directory", "/dev/shm", "locked memory"}
    done = run_forked(["doctor", "--node"], tmp_path, without_slurm)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--node needs Slurm, but there is no Slurm here" in done.stderr


def test_newest_run_that_has_saved_is_the_default(tmp_path: Path) -> None:
    new_run(tmp_path, "older", save_seconds=9.0)
    saved = new_run(tmp_path, "newer", save_seconds=3.0)
    new_run(tmp_path, "newest")
    assert find_run(DoctorOptions(runs_dir=tmp_path)) == saved
    assert find_run(DoctorOptions(runs_dir=tmp_path / "none")) is None


def test_measurements_are_of_the_last_attempt(tmp_path: Path) -> None:
    run = new_run(tmp_path, "r", save_seconds=3.0)
    for reason in ("no room", None):
        staged = {"event": "staged", "attempt": 1, "node": "a", "source": "/d", "in_place": reason}
        append_json_line(run.events / "x.jsonl", {"time": 2.0, **staged})
    assert measurements_of(run).in_place == "no room", "on one of its nodes"
    append_json_line(run.events / "x.jsonl", {"time": 9.0, "event": "first_step", "attempt": 2, "step": 1})
    assert (measurements_of(run).save_seconds, measurements_of(run).in_place) == (3.0, None)


def srun_of(resources: Resources, runs_dir: Path, *names: str) -> list[str]:
    job = NodeJob(
        name="doctor", resources=resources, network=Network(), names=names, stage_dir=Path("/tmp"), python="python3"
    )  # fmt: skip
    return srun_argv(job, runs_dir)


def test_srun_requests_the_resources_of_submit(tmp_path: Path) -> None:
    resources = resources_of(nodes="2", gpus_per_node="4", partition="gpu", account="me", time="10m", sbatch=("x=y",))
    argv = srun_of(resources, tmp_path, "gpu01", "gpu02")
    asked = {"--nodes=2", "--gpus-per-node=4", "--partition=gpu", "--account=me", "--nodelist=gpu01,gpu02", "--x=y"}
    assert asked <= set(argv)
    assert argv[-8:] == ["jobs.node_probe", "doctor", str(tmp_path), "/tmp", "4", "", "", "python3"]
    without_gpus = srun_of(resources_of(gpus_per_node="0", partition="cpu", time="10m"), tmp_path)
    assert "--cpus-per-task=1" in without_gpus
    assert not any(word.startswith("--gpu") for word in without_gpus)
    assert without_gpus[-4] == "0"


def test_reports_of_tasks_that_print_at_the_same_time() -> None:
    lines = [json.dumps(asdict(NODE), indent=0).splitlines() for _ in range(2)]
    mixed = [f"{task:>2}: {line}" for pair in zip(*lines, strict=True) for task, line in enumerate(pair)]
    assert read_reports("\n".join(["0: a word of the site's prologue", *mixed])) == [NODE, NODE]
    assert read_reports("\n".join(mixed[:-2])) == [], "reports that were cut off are none"
    assert read_reports("") == []


@pytest.mark.slow
def test_node_that_does_not_see_the_runs_directory_inspects_itself(tmp_path: Path) -> None:
    clients = answer(tmp_path, squeue="", sinfo="", scontrol="", scancel="")
    (clients / "timeout").symlink_to("/usr/bin/timeout")
    allocation = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost",
        "CUDA_VISIBLE_DEVICES": "", "PATH": str(clients),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jobs.node_probe", "doctor", "/nonexistent", "/tmp", "1", "", ""],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **allocation}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["name"] == "localhost"
    assert report["sees_runs"] is False
    assert report["preflight"].startswith("preflight: 1 rank on CPU")
    assert report["slurm_error"] == "sbatch: not on the PATH"


@pytest.mark.timeout(400)
def test_nodes_of_the_testbed(site: Site) -> None:
    done = site.hpc("doctor", "--node", "gpu[02-03]", "--json")
    found = {(finding["check"], finding["where"]): finding for finding in json.loads(done.stdout)}
    both = "gpu02 gpu03"
    assert done.returncode == 1, "the testbed's GPUs are none"
    assert found["runs directory", both]["severity"] == "ok"
    assert found["Slurm's commands", both]["severity"] == "ok", found["Slurm's commands", both]["value"]
    assert found["stage directory", both]["severity"] == "note", "a node of the testbed has its /tmp in memory"
    assert found["network interface", both]["severity"] == "ok"
    (told,) = [finding for (check, _), finding in found.items() if check == "preflight" and finding["cost"]]
    assert told["value"].startswith("preflight: 2 ranks on CPU, all-reduce")
    assert found["runs directory", "login"]["severity"] == "ok", "the nodes have seen it"
    assert [path.name for path in site.path.iterdir() if path.name.startswith(".doctor")] == []
