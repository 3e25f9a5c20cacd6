"""`hpc doctor` as it is typed: without Slurm, with a recorded one, with one that is silent, and on real nodes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TIMEOUT_SECONDS, Site, hpc, slow_link
from support.events import resources_of
from support.fake_slurm import write_programs
from support.forked_hpc import run_forked
from support.waiting import wait_for
from test_findings import CONFIG, NODE, PARTITIONS

from hpc.cluster.doctor.node_job import read_reports, srun_argv

ANSWERS = {
    "scontrol": ('case "$*" in\n*partition) cat partitions;;\n*config) cat config;;\n*) exit 1;;\nesac\n'),
    "sbatch": "exit 1\n",
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


def test_recorded_cluster(tmp_path: Path, recorded: Path) -> None:
    (recorded / "config").write_text(CONFIG.replace("300 sec", "0 sec"))
    done = doctor(tmp_path, recorded, "--json")
    found = findings(done)
    assert done.returncode == 1, done.stderr
    assert found["preemption"]["severity"] == "ok"
    assert found["SlurmdTimeout"]["severity"] == "cost"


def test_silent_controller_is_one_finding(tmp_path: Path, recorded: Path) -> None:
    answer(recorded, scontrol=SILENT)
    done = doctor(tmp_path, recorded, "--json")
    found = findings(done)
    assert done.returncode == 1
    assert "Unable to contact slurm controller" in found["slurm"]["value"]
    assert set(found) == {"slurm", "runs directory", "nodes"}


def test_without_slurm_this_machine_is_inspected_and_no_node(tmp_path: Path) -> None:
    without_slurm = {"PATH": "/nonexistent"}
    found = findings(run_forked(["doctor", "--json"], tmp_path, without_slurm))
    assert found["slurm"]["severity"] == "note"
    assert set(found) == {"slurm", "stage directory", "/dev/shm", "locked memory"}
    done = run_forked(["doctor", "--nodes=2"], tmp_path, without_slurm)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nodes measures nodes of a cluster, but there is no Slurm here (sbatch is not on the PATH)" in done.stderr
    assert run_forked(["doctor", "--nodes=none"], tmp_path, without_slurm).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_default_number_of_nodes_measures_no_node(tmp_path: Path) -> None:
    """A user's default is for runs: only a typed --nodes starts a job."""
    (tmp_path / "torchrelay.yaml").write_text("nodes: 2\n")
    done = run_forked(["doctor"], tmp_path, {"PATH": "/nonexistent", "XDG_CONFIG_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_srun_requests_the_resources_of_submit() -> None:
    resources = resources_of(nodes="2", gpus_per_node="4", partition="gpu", account="me", time="10m", sbatch=("x=y",))
    argv = srun_argv(resources, ("gpu01", "gpu02"), ("module", "argument"))
    asked = {"--nodes=2", "--gpus-per-node=4", "--partition=gpu", "--account=me", "--nodelist=gpu01,gpu02", "--x=y"}
    assert asked <= set(argv)
    assert argv[-2:] == ["module", "argument"]
    without_gpus = srun_argv(resources_of(gpus_per_node="0", partition="cpu", time="10m"), (), ("module",))
    assert "--cpus-per-task=1" in without_gpus
    assert not any(word.startswith("--gpu") for word in without_gpus)


def test_reports_of_tasks_that_print_at_the_same_time() -> None:
    lines = [json.dumps(asdict(NODE), indent=0).splitlines() for _ in range(2)]
    mixed = [f"{task:>2}: {line}" for pair in zip(*lines, strict=True) for task, line in enumerate(pair)]
    assert read_reports("\n".join(["0: a word of the site's prologue", *mixed])) == [NODE, NODE]
    assert read_reports("\n".join(mixed[:-2])) == [], "reports that were cut off are none"
    assert read_reports("") == []


@pytest.mark.timeout(400)
def test_nodes_of_the_testbed_are_measured_and_the_slow_one_is_named(ordinary_user: Site) -> None:
    with slow_link("gpu03", "100mbit"):
        done = ordinary_user.hpc("doctor", "--node", "gpu[02-04]", "--gpus-per-node=1", "--json")
    nodes = {"gpu02", "gpu03", "gpu04"}
    found = json.loads(done.stdout)
    assert done.returncode == 1, "the testbed's GPUs are none"
    severities = dict[str, dict[str, str]]()
    for finding in found:
        severities.setdefault(finding["check"], {})[finding["where"].partition(" ")[0]] = finding["severity"]
    assert severities["Slurm's commands"] == dict.fromkeys(nodes, "ok"), found
    assert severities["stage directory"] == dict.fromkeys(nodes, "note"), "a node of the testbed has its /tmp in memory"
    assert severities["runs directory"] == {"login": "ok", **dict.fromkeys(nodes, "ok")}, "the nodes have seen it"
    assert severities["preflight"] == dict.fromkeys(nodes, "cost")
    assert (severities["network"].keys(), severities["network"]["gpu03"]) == (nodes, "cost"), found
    measured = ("computing", "writes to the stage directory", "writes to the runs directory")
    assert all(one["number"] > 0 for one in found if one["check"] in measured)
    assert all(severities[check].keys() == nodes for check in measured)
    assert [path.name for path in ordinary_user.path.iterdir() if path.name.startswith(".doctor")] == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["Ctrl-C", "scancel"])
def test_measurement_that_is_interrupted_leaves_nothing(ordinary_user: Site, how: str) -> None:
    command = [sys.executable, "-m", "hpc", "doctor", "--nodes=2", "--gpus-per-node=1"]
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    typed = ordinary_user._as_the_user({})  # noqa: SLF001 - as its other methods do
    with subprocess.Popen(command, **typed, **out, start_new_session=True) as running:
        # Written by the first node when it begins, so the job is in the middle.
        wait_for(lambda: list(ordinary_user.path.glob("**/.doctor-*/events/*.jsonl")))
        if how == "Ctrl-C":
            os.killpg(running.pid, signal.SIGINT)
        else:
            ordinary_user.slurm("scancel", "--me")
        printed, problem = running.communicate(timeout=TIMEOUT_SECONDS)
    assert running.returncode == (130 if how == "Ctrl-C" else 1), problem
    assert ("0 of 2 nodes answered" in printed) == (how == "scancel")
    assert not list(ordinary_user.path.glob("**/.doctor-*"))
    wait_for(lambda: not ordinary_user.slurm("squeue", "--me", "--noheader"))
