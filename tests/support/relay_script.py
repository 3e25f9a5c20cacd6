"""A small script that uses torchrelay, in ranks with the environment that a run gives it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay import this_rank
from torchrelay.saving.owner import Owner

from hpc.base.environment import ATTEMPT, NEXT_CLAIM, PROTOCOL, RUN_DIR
from hpc.run.events.ledger import claim_file
from hpc.run.rundir import RunDir
from support.trainings import run_forked


class StrictOwner(Owner):
    """A script whose states must all be usable and saved."""

    def warn(self, text: str) -> None:
        """Fail: nothing may go wrong."""
        raise AssertionError(text)


# A model of one rank's own noise: whether random numbers, weights and own objects go on is seen in the last line.
SCRIPT = """
import json, os, signal, sys, time
from torchrelay import report, should_stop, state
import torch
from torch import distributed, nn

steps, stop_at, kill_at = (int(word) for word in sys.argv[1:4])
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
distributed.init_process_group("gloo")
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
torch.manual_seed(100 + rank)


class Count:
    seen = 0
    def state_dict(self): return {"seen": self.seen}
    def load_state_dict(self, state): self.seen = state["seen"]


count, fresh = Count(), True
begin = time.monotonic()
with state(
    snapshot_seconds=float(os.environ.get("EVERY", "0.001")), model=model, optimizer=optimizer, schedule=schedule,
    count=count,
) as saved:
    restored, stopped = saved.step, False
    while saved.step < steps:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        count.seen += rank + 1
        saved.step += 1
        report(step=saved.step, loss=loss, epoch=0)
        if saved.step == kill_at and rank == world_size - 1 and not restored:
            time.sleep(float(os.environ.get("WAIT", "0.5")))
            os.kill(os.getpid(), signal.SIGKILL)
        if saved.step == stop_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        if should_stop():
            stopped = True
            break
        if not os.environ.get("FAST"):
            time.sleep(0.01)
weights = [float(p.double().sum()) for p in model.parameters()]
line = {"restored": restored, "step": saved.step, "stopped": stopped, "weights": weights, "seen": count.seen}
with open(os.environ["RESULTS"] + f"/{rank}.jsonl", "a") as file:
    file.write(json.dumps(line) + "\\n")
distributed.destroy_process_group()
"""


def agent_variables(run_dir: Path) -> dict[str, str]:
    """The variables by which an agent tells a rank of the first attempt where to write, and until when."""
    run = RunDir(run_dir)
    run.events.mkdir(parents=True, exist_ok=True)
    own = {ATTEMPT: "1", PROTOCOL: this_rank.PROTOCOL, NEXT_CLAIM: str(claim_file(run, 2))}
    return {RUN_DIR: str(run_dir), **own}


@dataclass(frozen=True)
class Script:
    """The script in a directory of its own, with the directories of a run."""

    path: Path

    def run(
        self, steps: int, *, stop_at: int = -1, kill_at: int = -1, ranks: int = 2, torchrun: bool = False,
        **environment: str,
    ) -> "subprocess.CompletedProcess[str]":  # fmt: skip
        """Run it to its end."""
        for directory in ("snapshots", "heartbeats", "results"):
            (self.path / directory).mkdir(parents=True, exist_ok=True)
        words = [str(number) for number in (steps, stop_at, kill_at)]
        environment = {
            **agent_variables(self.path / "run"),
            "TORCHRELAY_SNAPSHOTS": str(self.path / "snapshots"), "RESULTS": str(self.path / "results"), **environment,
        }  # fmt: skip
        if not torchrun:
            return run_forked(SCRIPT, *words, directory=self.path, ranks=ranks, **environment)
        (self.path / "script.py").write_text(SCRIPT)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return subprocess.run(
            [*launch, "script.py", *words], env={**os.environ, **environment}, cwd=self.path, capture_output=True,
            text=True, check=False, timeout=200,
        )  # fmt: skip

    def results(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has written at the end of each start."""
        path = self.path / "results" / f"{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the run."""
        return [json.loads(line) for line in (self.path / "run" / name).read_text().splitlines()]

    def saved(self) -> list[str]:
        """The names of its checkpoints."""
        return sorted(path.name for path in (self.path / "run" / "checkpoints").iterdir())
