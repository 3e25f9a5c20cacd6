"""What the tests of the report share: runs as submit, the agents and rank 0 leave them, made in a moment."""

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.base.files import append_json_line
from hpc.commands.runs.report import main
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from support.events import (
    attempt_ended,
    claimed,
    event,
    first_step,
    interruption,
    of_training,
    resources_of,
    submitted,
    train_started,
    write_events,
)
from training.config.train_config import TrainConfig

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
CLASSES = ("cat", "dog", HOSTILE)
STEPS, EPOCH = 400, 100
BEGAN = 1_700_000_000.0
# Attempt 1 crashes at step 120 and goes on, is preempted at 210; attempt 2 completes.
EVENTS = (
    submitted(BEGAN, stop_lead_seconds=30),
    claimed(BEGAN + 1, nodes=("a1", "a2")),
    event("preflight", BEGAN + 7, attempt=1, world_size=2, device="H200", seconds=0.1),
    event("software", BEGAN + 8, attempt=1, torch="2.15.0", cuda="13.2", driver="595.1"),
    train_started(BEGAN + 9, total_steps=STEPS, world_size=2),
    first_step(BEGAN + 10),
    interruption(BEGAN + 131, step=120, rank=1, node="a2", detail=HOSTILE, failed_at=BEGAN + 130),
    train_started(BEGAN + 139, 118, total_steps=STEPS, world_size=2),
    first_step(BEGAN + 140, 119),
    attempt_ended(BEGAN + 234, "preempted", step=210, failed_at=BEGAN + 232),
    claimed(BEGAN + 300, 2, restart=1, nodes=("a1", "a3")),
    train_started(BEGAN + 309, 210, attempt=2, total_steps=STEPS, world_size=2),
    first_step(BEGAN + 310, 211, attempt=2),
    attempt_ended(BEGAN + 505, attempt=2, step=STEPS),
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def time_of(step: int) -> float:
    """When a step was done, a second each, in accordance with the events."""
    return BEGAN + step + (9 if step < 119 else 21 if step < 211 else 99)


def spec_of(name: str, **settings: Any) -> RunSpec:
    """Of a training on the cluster, with a recipe."""
    train = TrainConfig(**{"data": "/data/pets", "epochs": 4, "batch_size": 64, **settings})
    resources = resources_of(nodes="2", gpus_per_node="1", cpus_per_gpu=4, time="1d", partition="gpu")
    return RunSpec(
        name=name, cluster="slurm", resources=resources, data=train.data, stage_dir="/tmp",
        **of_training(train, recipe="cifar"),
    )  # fmt: skip


def pending_run(path: Path, spec: RunSpec | None = None) -> RunDir:
    """A run that has been submitted, and nothing more."""
    run = RunDir(path)
    for directory in (run.logs, run.packages.parent):
        directory.mkdir(parents=True)
    run.revision.write_text(f"{COMMIT}+dirty\n")
    (spec or spec_of(run.name)).save(run)
    write_events(run, EVENTS[0], file="agent.jsonl")
    return run


def running_run(path: Path, loss: float = 2.0, spec: RunSpec | None = None) -> RunDir:
    """A run in its second attempt; `loss` is that of the first step."""
    run = pending_run(path, spec)
    write_events(run, *EVENTS[1:-1], file="agent.jsonl")
    run.train_metrics.parent.mkdir()
    for step in range(2, STEPS + 1, 2):
        attempt = 1 if step <= 210 else 2
        noise = 0.1 * ((7 * step) % 13) / 13
        line = {"step": step, "epoch": (step - 1) // EPOCH + 1, "loss": loss / (1 + step / 40) + noise}
        line |= {"lr": 0.1 * (1 - step / STEPS), "images_per_second": 900 + 300 * noise, "world_size": 2}
        line |= {"train_seconds": 0.9 * step, "attempt": attempt, "time": time_of(step)}
        line |= {"accuracy": 0.9 - 0.5 / step, "data_wait_share": noise, "memory_bytes": 2**30}
        append_json_line(run.train_metrics, line)
    for epoch in range(1, 5):
        _evaluate(run, epoch, "val", 0.5 + 0.1 * epoch)
    return run


def _evaluate(run: RunDir, epoch: int, split: str, accuracy: float) -> None:
    line = {"step": EPOCH * epoch, "epoch": epoch, "split": split, "loss": 1.5 / epoch, "accuracy": accuracy}
    line |= {"correct": int(200 * accuracy), "total": 200, "corrupt": 0, "attempt": 2, "time": time_of(EPOCH * epoch)}
    line["top5_accuracy"] = (1 + accuracy) / 2
    append_json_line(run.eval_metrics, line)


def completed_run(path: Path, loss: float = 2.0) -> RunDir:
    """A run with a test result."""
    run = running_run(path, loss)
    complete(run)
    return run


def complete(run: RunDir) -> None:
    """End a running run, with a test result."""
    write_events(run, EVENTS[-1], file="agent.jsonl")
    _evaluate(run, 4, "test", 0.85)
    run.final.mkdir()
    best = {"epoch": 3, "test_accuracy": 0.875}
    run.final_result.write_text(json.dumps({"test_accuracy": 0.85, "test_total": 60, "best": best}))
    rows = [("true class", *CLASSES), ("cat", 18, 2, 0), ("dog", 1, 19, 0), (HOSTILE, 0, 6, 14)]
    quoted = [",".join('"' + str(cell).replace('"', '""') + '"' for cell in row) for row in rows]
    run.confusion.write_text("\n".join(quoted) + "\n")


@dataclass(frozen=True)
class Written:
    """A report that has been written."""

    path: Path
    tables: tuple[Path, ...]

    @property
    def whole(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def html(self) -> str:
        """What is no script: the reader's part of the page."""
        return re.sub(r"<script[ >].*?</script>", "", self.whole, flags=re.DOTALL)


def report(*arguments: object) -> Written:
    """Type `hpc report ... --json`, which has to succeed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main([*map(str, arguments), "--json"])
    assert code == 0, errors.getvalue()
    answer = json.loads(out.getvalue())
    return Written(Path(answer["report"]), tuple(Path(table) for table in answer["tables"]))
