"""What each drill costs a run, on the real Slurm of the testbed: `make drill`.

    .venv/bin/python -m benchmarks.drill

Plays each drill of `hpc drill` on one small run (Fashion-MNIST, 2 of 6 nodes and a spare, 1 rank each), and records the
seconds of each phase. Slurm notices a dead node after 300 s here, its default. No supervisor runs.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Findings, Flags, benchmark
from benchmarks.hpc_commands import hpc, testbed
from hpc.run.events.interruptions import PARTS

BATCH = 512
RUN = [
    "--data=fashion-mnist", "--name=drill", "--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1", "--epochs=100000",
    f"--batch-size={BATCH}", "--lr=0.05", "--lr-scheduler=constant", "--hang-timeout=10s", "--log-every=5",
    "--checkpoint-every=5m",
]  # fmt: skip
COLUMNS = (*PARTS, "total")


def submit(runs_dir: Path, *flags: str) -> Path:
    """Submit the run, and return its directory."""
    return Path(hpc("submit", *RUN, *flags, f"--runs-dir={runs_dir}")["run_dir"])


def status(run: Path) -> dict[str, Any]:
    """Return the run's entry of `hpc status`."""
    entry: dict[str, Any] = hpc("status", str(run))[0]
    return entry


def wait_for_steps(run: Path, seconds: float = 15.0) -> None:
    """Wait until the run has trained for a while, so that one failure is not the last one's."""
    step = None
    while (now := status(run))["state"] != "running" or now["step"] is None or now["step"] == step:
        step = now["step"]
        time.sleep(1)
    time.sleep(seconds)


def play(run: Path, kind: str, *flags: str) -> list[dict[str, Any]]:
    """Play one drill, and return the interruptions that it caused."""
    wait_for_steps(run)
    began = time.monotonic()
    found: list[dict[str, Any]] = hpc("drill", str(run), kind, "--yes", *flags)["interruptions"]
    print(f"{kind}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return found


def row(name: str, interruption: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    seconds = {part: value and round(value, 1) for part, value in interruption["seconds"].items()}
    parts = {part: seconds[part] for part in COLUMNS}
    return {"what": name, "cause": interruption["cause"], **parts, "steps lost": interruption["steps_lost"]}


def drills(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Play all drills, and return what each cost, by its name."""
    found = {name: play(run, kind) for name, kind in (
        ("worker killed", "worker-kill"), ("worker hung (--hang-timeout 10s)", "hang"), ("preempted", "preempt"),
    )}  # fmt: skip
    attempts = len(status(run)["attempts"])
    found["node killed, a spare takes over"] = play(run, "node-kill")
    if len(status(run)["attempts"]) != attempts:
        raise SystemExit("the lost node ended the attempt, in spite of the spare")
    lost = found["node killed, a spare takes over"][0]["node"]
    hpc("testbed", "revive-node", lost)
    head = status(run)["attempts"][-1]["nodes"][0]
    found["first node killed"] = play(run, "node-kill", f"--node={head}")
    return found


def measure(_: Flags) -> Findings:
    """Build a testbed, start the run, and play."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-drill-") as directory,
        # It ends first: then nobody writes into the directory any more when it is removed.
        testbed("--nodes=6", "--gpus-per-node=4", "--slurmd-timeout=300"),
    ):
        run = submit(Path(directory), "--spares=1")
        found = drills(run)
        after = status(run)
    rows = [row(name, each) for name, interruptions in found.items() for each in interruptions]
    return Findings(tables={"rows": rows}, more={"goodput": after["goodput"], "attempts": len(after["attempts"])})


if __name__ == "__main__":
    benchmark("drill", Flags, measure, small={})
