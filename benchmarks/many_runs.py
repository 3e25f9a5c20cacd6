"""Many run directories, and a Slurm whose queue is full: what `benchmarks/commands.py` has `hpc status` look at.

Each run has four attempts with the events of two nodes and rank 0; every tenth run has logged 100,000 steps (one file,
by many names: only its tail is read). An executable `squeue` prints the jobs, a few of which are the runs'.
"""

import json
import os
from pathlib import Path
from typing import Any

from hpc.base.files import json_line
from hpc.run.rundir import RunDir
from hpc.run.spec import Resources, RunSpec
from hpc.run.spec_file import script_program

ATTEMPTS, SAVES, STEPS = 4, 30, 10_000
NODES = ["gpu01", "gpu02"]
# Of ten runs, six are complete, two train, one waits and one has failed.
STATES = ("completed",) * 6 + ("RUNNING",) * 2 + ("PENDING", "failed")
START, TIME = 1_790_000_000.0, "2026-11-21T09:00:05"


def attempt_events(number: int, state: str) -> dict[str, list[dict[str, Any]]]:
    """Return the events of one attempt, by the writer's file."""
    began, first = START + 7200 * number, STEPS * (number - 1) // ATTEMPTS
    last = STEPS * number // ATTEMPTS
    head = f"attempt-{number:03d}-node-00"
    files: dict[str, list[dict[str, Any]]] = {
        head: [{"event": "claimed", "job_id": "7", "restart": number, "secret": "a1b2", "port": 9, "nodes": NODES}]
    }
    for rank, node in enumerate(NODES):
        joined = {"event": "joined", "node": node, "node_rank": rank, "clock_skew_seconds": 0.001}
        free = {"tmp_free_bytes": 10**12, "shm_free_bytes": 10**11}
        copy = {"source": "/data/x", "path": "/local/torchrelay-1/x", "reused": True}
        staged = {"event": "staged", "node": node, "seconds": 4.2, **copy}
        files.setdefault(f"attempt-{number:03d}-node-{rank:02d}", []).extend([{**joined, **free}, staged])
    files[head].append({"event": "rendezvous", "round": 1, "port": 9, "members": [0, 1]})
    restored = {"restored_from": str(first), "source": "checkpoint", "connect_seconds": 8.0, "restore_seconds": 1.0}
    files[f"attempt-{number:03d}-trainer"] = [
        {"event": "train_started", "step": first, "total_steps": STEPS, "world_size": 8, "seconds": 9.0, **restored},
        {"event": "first_step", "step": first + 1},
        *({"event": "checkpoint_saved", "step": first + i, "seconds": 2.0, "copy_seconds": 0.1} for i in range(SAVES)),
    ]
    if number < ATTEMPTS or state in {"completed", "failed"}:
        cause = "preempted" if number < ATTEMPTS else {"failed": "bad_input"}.get(state, state)
        ended = {"event": "attempt_ended", "cause": cause, "step": last, "detail": None}
        files[f"attempt-{number:03d}-end"] = [ended]
        files[head] += [{"event": "requeued", "job_id": "7"}] if number < ATTEMPTS else []
    for events in files.values():
        for i, event in enumerate(events):
            event |= {"time": began + i, "attempt": number}
    return files


def train_line(step: int) -> str:
    """Return one line of train.jsonl."""
    numbers = {"loss": 1.234567, "lr": 0.1, "images_per_second": 4321.0, "world_size": 8, "train_seconds": step * 0.5}
    return json_line({"step": step, "epoch": step // 100, **numbers, "attempt": 4, "time": START + step})


def make_run(run: RunDir, index: int, logs: tuple[Path, Path]) -> None:
    """Make a run directory, as a run leaves it."""
    state = STATES[index % len(STATES)]
    run.events.mkdir(parents=True)
    run.train_metrics.parent.mkdir()
    program = script_program(("train.py",))
    RunSpec(name=run.name, cluster="slurm", data=None, stage_dir="/local", resources=Resources(), program=program).save(
        run
    )
    run.script.write_text("#!/bin/bash\n")
    submitted = {"time": START, "event": "submitted", "job_id": str(index), "cluster": "slurm", "started": None}
    (run.events / "submit.jsonl").write_text(json_line({**submitted, "stop_lead_seconds": 300, "grace_seconds": 60}))
    for number in range(1, ATTEMPTS + 1):
        for name, events in attempt_events(number, state).items():
            (run.events / f"{name}.jsonl").write_text("".join(map(json_line, events)))
    # A name more for the same data: a gigabyte of them would measure the disk.
    os.link(logs[index % 10 == 0], run.train_metrics)
    validation = {"split": "val", "loss": 1.0, "accuracy": 0.7, "time": START}
    run.eval_metrics.write_text("".join(json_line({**validation, "epoch": i, "step": 100 * i}) for i in range(90)))
    if state == "completed":
        run.final.mkdir()
        run.final_result.write_text(json.dumps({"test_accuracy": 0.8, "test_loss": 1.0}))


def queue_lines(runs: list[RunDir], jobs: int) -> list[str]:
    """Return what squeue prints: the jobs of the runs that are alive, among others of the user's."""
    words = {"RUNNING": ("RUNNING", "None", "gpu[01-02]", "gpu01"), "PENDING": ("PENDING", "Priority", "", "")}
    alive = [(i, run) for i, run in enumerate(runs) if STATES[i % len(STATES)] in words]
    ours = [(*words[STATES[i % len(STATES)]], str(run.script)) for i, run in alive]
    other = [("PENDING", "Resources", "", "", f"/home/me/sweep/{i}/run.sh") for i in range(jobs - len(ours))]
    # In the order of the fields that hpc.slurm.squeue asks for.
    form = f"{{}}|{{}}|{{}}|{{}}|{{}}|0|{TIME}|{TIME}|{{}}|"
    return [form.format(i, *job) for i, job in enumerate([*ours, *other])]


def make(root: Path, runs: int, jobs: int) -> dict[str, str]:
    """Make `root/runs` and the executables of Slurm; return the environment in which these are used."""
    logs = root / "short.jsonl", root / "long.jsonl"
    for log, lines in zip(logs, (200, 100_000), strict=True):
        log.write_text("".join(map(train_line, range(1, lines + 1))))
    made = [RunDir(root / "runs" / f"resnet50-{i:04d}") for i in range(runs)]
    for i, run in enumerate(made):
        make_run(run, i, logs)
    (root / "queue").write_text("\n".join(queue_lines(made, jobs)) + "\n")
    (root / "slurm.conf").touch()
    for name in ("squeue", "sbatch", "scontrol"):
        program = root / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\nexec cat {root}/queue\n")
        program.chmod(0o755)
    return {"PATH": f"{root}/bin:{os.environ['PATH']}", "SLURM_CONF": f"{root}/slurm.conf"}
