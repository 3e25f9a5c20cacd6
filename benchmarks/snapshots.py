"""What a snapshot costs a training on a CPU, for states of 1 MB to 1 GB.

    .venv/bin/python -m benchmarks.snapshots

One rank trains on small generated images, and takes a snapshot after every step. The table has medians:

- stall: milliseconds for which the training waits;
- cost: milliseconds of CPU time, of which `--snapshot-every auto` spends at most 0.5 %;
- written: milliseconds until the snapshot is in the node's memory;
- copy: milliseconds in which this machine copies as many bytes in memory, for comparison;
- every: seconds between two snapshots with `--snapshot-every auto`;
- script: milliseconds of CPU time that `state(model=..., optimizer=...)` takes for a snapshot of the same model.

Takes a minute on two cores that nobody else uses.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torchrelay.object_states import CopyMemory, Saveable, capture_states
from torchrelay.saved_state import Snapshots

from benchmarks.harness import Findings, Flags, Row, benchmark
from benchmarks.speed.loops import Case
from benchmarks.speed.our_loop import our_trainer
from hpc.run.nodedir import NodeDir
from training.checkpoint.state import TrainState
from training.config.save_interval import AUTO_OVERHEAD, parse_interval
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from

CASES = (
    Case(model="small-cnn", image_size=28, batch_size=2),
    Case(model="resnet20", image_size=32, batch_size=2),
    Case(model="resnet18", image_size=32, batch_size=2),
    Case(model="resnet101", image_size=32, batch_size=2),
    Case(model="vit_b_16", image_size=32, batch_size=2, optimizer="adamw"),
)


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    snapshots: int = 10
    """Snapshots of each model."""


def row_of(case: Case, count: int) -> Row:
    """Train a model, and take so many snapshots."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as directory:
        group = connect(rank_info_from({}))
        trainer = our_trainer(case, group, Path(directory), NodeDir(Path(memory)), snapshot_every="1000000")
        trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
        trainer.resume()
        writer, steps, stalls, costs, written = trainer.snapshot_writer, trainer.steps(), [], [], []
        for _ in range(count + 1):
            next(steps)
            began = time.monotonic()
            writer.save()
            stalls.append(time.monotonic() - began)
            writer.wait()
            written.append(time.monotonic() - began)
            costs.append(writer.cost_seconds)
        size_bytes, copy = copy_of(trainer.state)
        script = script_cost(trainer.state, Path(memory) / "script", count)
        trainer.logger.close()
        disconnect()
    auto = parse_interval("snapshot_every", "auto").seconds or 0.0
    cost = median(costs[1:])  # the first snapshot allocates memory
    return {
        "model": case.model, "state_mb": round(size_bytes / 1e6, 1), "stall_ms": round(median(stalls[1:]) * 1e3, 1),
        "cost_ms": round(cost * 1e3, 1), "written_ms": round(median(written[1:]) * 1e3, 1),
        "copy_ms": round(copy * 1e3, 1), "every_s": round(max(auto, cost / AUTO_OVERHEAD), 1),
        "script_ms": round(script * 1e3, 1),
    }  # fmt: skip


def script_cost(state: TrainState, directory: Path, count: int) -> float:
    """Return the median seconds of CPU time of a script's snapshot."""
    objects: dict[str, Saveable] = {"model": state.model, "optimizer": state.optimizer}
    snapshots, memory, seconds = Snapshots(directory), CopyMemory(), []
    for step in range(count + 1):
        began = time.thread_time()
        content = capture_states(objects, step, memory)
        snapshots.save(step, content, memory.size_bytes)
        seconds.append(time.thread_time() - began)
    return median(seconds[1:])


def copy_of(state: TrainState) -> tuple[int, float]:
    """Return the bytes of a state, and the median seconds of a copy of as many bytes in memory."""
    size_bytes = sum(tensor.nbytes for tensor in state.state_dict()[0].values())
    source, target, seconds = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8), []
    for _ in range(5):
        began = time.monotonic()
        target.copy_(source)
        seconds.append(time.monotonic() - began)
    return size_bytes, median(seconds)


def measure(options: Options) -> Findings:
    """Measure the models one after the other."""
    torch.set_num_threads(1)
    return Findings(tables={"rows": [row_of(case, options.snapshots) for case in CASES]})


if __name__ == "__main__":
    benchmark("snapshots", Options(), measure, small={"snapshots": 3})
