"""A transformer of 100 million parameters under FSDP2 and AdamW on three nodes loses one, and goes on with two.

    tests/own-machine -m benchmarks.sharded_run

Runs examples/fsdp2/train.py on the testbed's real Slurm: undisturbed, with a killed rank, and with a lost node. Prints
how many steps were lost, whether the losses are equal, and the memory of a rank: its proportional set size (PSS) of its
own memory and of shared memory, which has the snapshots.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, table
from benchmarks.hpc_commands import hpc, testbed

STEPS = 14
SCRIPT = [str(ROOT / "examples/fsdp2/train.py"), "--width=768", "--layers=14", f"--steps={STEPS}"]


def submit(runs: Path, data: Path, name: str, nodes: str) -> Path:
    """Submit the script with 1 rank on each node, and return the run's directory."""
    flags = [f"--nodes={nodes}", "--gpus-per-node=1", "--cpus-per-gpu=1", "--device=cpu", f"--name={name}"]
    run = hpc("submit", *flags, f"--runs-dir={runs}", "--", *SCRIPT, f"--data={data}", directory=ROOT)
    return Path(run["run_dir"])


def status(run: Path) -> dict[str, Any]:
    """Return the run's entry of `hpc status`."""
    found: dict[str, Any] = hpc("status", str(run))[0]
    return found


def wait(run: Path, until: int | str) -> dict[str, Any]:
    """Wait for a step, or for a state of the run."""
    while True:
        now = status(run)
        if now["state"] == until or (isinstance(until, int) and (now["step"] or 0) >= until):
            return now
        if now["state"] in {"failed", "cancelled"}:
            raise SystemExit(f"{run.name}: {now['detail']}")
        time.sleep(1)


def losses(run: Path) -> dict[int, float]:
    """Return the last logged loss of each step."""
    lines = (json.loads(line) for line in (run / "metrics/train.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def memory(title: str) -> dict[str, int]:
    """Return the proportional set size of a rank's process in MB, of its own memory and of shared memory.

    `title` is a part of the process's title.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if title.encode() not in (process / "cmdline").read_bytes():
                continue
            lines = (line.split() for line in (process / "smaps_rollup").read_text().splitlines()[1:])
            numbers = {name: int(number) for name, number, *_ in lines}
        except OSError:
            continue
        if numbers["Pss_Anon:"] > 500_000:  # not a process that waits for the rank
            return {name: numbers[f"Pss_{name}:"] // 1000 for name in ("Anon", "Shmem")}
    return {}


def main() -> None:
    """Run, and print."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="torchrelay-sharded-") as directory,
        testbed("--nodes=3", "--gpus-per-node=1", "--slurmd-timeout=300"),
    ):
        base = Path(directory)
        base.chmod(0o755)
        (base / "text").mkdir()
        pages = sorted((ROOT / "docs").rglob("*.md"))
        (base / "text/train.txt").write_text("".join(page.read_text() for page in pages))
        whole = submit(base / "runs", base / "text", "whole", "3")
        wait(whole, 6)
        used = memory("[rank 0/3 of whole]")
        wait(whole, "completed")
        print(f"undisturbed: {json.dumps(used)} MB of PSS in rank 0", flush=True)
        killed = submit(base / "runs", base / "text", "killed", "3")
        wait(killed, 6)
        cost = hpc("drill", str(killed), "worker-kill", "--yes")["interruptions"]
        wait(killed, "completed")
        equal = losses(killed) == losses(whole)
        print(f"rank killed: {cost[0]['steps_lost']} steps lost; losses equal: {equal}", flush=True)
        lost = submit(base / "runs", base / "text", "lost", "2:3")
        wait(lost, 6)
        cost = hpc("drill", str(lost), "node-kill", "--yes")["interruptions"]
        after = wait(lost, "completed")
        difference = max(abs(losses(lost)[step] / loss - 1) for step, loss in losses(whole).items())
        print(
            f"node lost: {cost[0]['steps_lost']} steps lost, {len(after['attempts'])} attempts, "
            f"{after['world_size']} ranks at the end; losses differ by at most {difference:.1%}",
            flush=True,
        )
        print(table([{"interruption": each["cause"], **each["seconds"]} for each in after["interruptions"]]))


if __name__ == "__main__":
    main()
