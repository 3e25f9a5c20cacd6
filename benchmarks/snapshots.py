"""What snapshots cost: images per second of training steps without them, with `auto`, and with one after every step.

    python -m benchmarks.snapshots
    torchrun --nproc-per-node 2 -m benchmarks.snapshots

The real trainer's steps on Fashion-MNIST, on all ranks and whatever device there is. The settings take turns, window by
window, within one training, so that a machine which slows down does so for all of them; each window is compared with
the one without snapshots beside it. A window ends when its last snapshot is written. Prints a Markdown table: the
speed and the CPU time of all ranks, which tells more on a machine that others use, against those without snapshots;
what a snapshot took from the training, by the speeds, and (what the trainer measured, which `auto` goes by).
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc.core.nodedir import NodeDir
from hpc.core.rundir import RunDir
from training.checkpoint.writer import SnapshotDestination, StateWriter, capture
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.engine.launch import make_trainer
from training.engine.trainer import Trainer
from training.runtime.determinism import configure
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.run_context import RunContext, rank_info_from
from training.runtime.stop_consensus import StopConsensus

SETTINGS = ("off", "auto", "1")
CASES = ({"model": "small-cnn", "batch_size": 512}, {"model": "resnet18", "image_size": 32, "batch_size": 128})
WINDOW_SECONDS = float(os.environ.get("WINDOW_SECONDS", "10"))
ROUNDS = int(os.environ.get("ROUNDS", "8"))
_MEMORY = Path("/dev/shm")  # noqa: S108 - a new directory in it


@dataclass
class Turn:
    """One setting's windows."""

    snapshot_writer: StateWriter
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    taken: int = 0
    paused_at: float = field(default_factory=time.monotonic)

    def window(self, trainer: Trainer, requests: Iterator[BatchRequest], steps: int) -> None:
        """Train for some steps, the time of which is kept."""
        trainer.snapshot_writer, trainer.stop_consensus = self.snapshot_writer, StopConsensus(trainer.group.control)
        # The other settings' windows do not count as time since the last snapshot.
        self.snapshot_writer._saved_at += time.monotonic() - self.paused_at  # noqa: SLF001
        trainer.group.all_gather_json(None)
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            if trainer.agree().snapshot:
                trainer.snapshot_writer.save()
                self.taken += 1
            trainer.stepper.step(trainer.data.train[next(requests)], trainer.loss_meter)
        # Waits for the device.
        trainer.check_loss(now=True)
        self.snapshot_writer.wait()
        self.seconds.append(max(trainer.group.all_gather_json(time.perf_counter() - began)))
        self.cpu_seconds.append(sum(trainer.group.all_gather_json(time.process_time() - began_cpu)))
        trainer.stop_consensus.wait()
        self.paused_at = time.monotonic()

    def measured_cost(self) -> float:
        """Seconds that the last snapshot took, as the trainer sees it."""
        return self.snapshot_writer.cost_seconds


def measure(trainer: Trainer, turns: dict[str, Turn]) -> int:
    """Let the settings take turns, and return the steps of a window. The first windows are not counted."""
    requests = trainer.schedule.requests(0, 0, trainer.group.rank, trainer.group.world_size)
    steps = 8
    for _ in range(2):
        for turn in turns.values():
            turn.window(trainer, requests, steps)
    steps = max(8, round(steps * WINDOW_SECONDS / turns["off"].seconds[-1]))
    for turn in turns.values():
        turn.seconds, turn.cpu_seconds, turn.taken = [], [], 0
    for _ in range(ROUNDS):
        for turn in turns.values():
            turn.window(trainer, requests, steps)
    return steps


def run(case: dict[str, object], group: ProcessGroup, directory: Path) -> None:
    """Measure one model and print its rows."""
    config = TrainConfig(data="fashion-mnist", epochs=10_000, **case)  # type: ignore[arg-type]  # any of its fields
    node = NodeDir(directory / f"node-{case['model']}")
    node.path.mkdir(mode=0o700, exist_ok=True)
    context = RunContext(
        config=config, run_dir=RunDir(directory / str(case["model"])), attempt=1, started=0.0, node_dir=node
    )
    trainer = make_trainer(context, group)
    trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
    turns = {}
    for setting in SETTINGS:
        own = replace(context, config=replace(config, snapshot_every=setting))
        destination = SnapshotDestination(own, group, trainer.logger, sharded=False)
        turns[setting] = Turn(StateWriter(destination, trainer.state, group))
    images = measure(trainer, turns) * trainer.schedule.batch_size
    size = sum(tensor.nbytes for tensor in capture(trainer.state, group)[0].values()) / 1e6
    if group.is_rank_zero:
        for setting, turn in turns.items():
            print(f"| {case['model']} | {size:.1f} | {setting} | {row(turn, turns['off'], images)} |", flush=True)


def row(turn: Turn, off: Turn, images: int) -> str:
    """One setting's cells."""
    speeds = [images / seconds for seconds in turn.seconds]
    against = statistics.median(without / seconds for seconds, without in zip(turn.seconds, off.seconds, strict=True))
    cpu = statistics.median(one / without for one, without in zip(turn.cpu_seconds, off.cpu_seconds, strict=True))
    lost = [seconds - without for seconds, without in zip(turn.seconds, off.seconds, strict=True)]
    each = statistics.median(lost) * ROUNDS / turn.taken * 1000 if turn.taken else 0.0
    cells = (f"{statistics.median(speeds):.1f}", f"{min(speeds):.1f}", f"{max(speeds):.1f}")
    shares = (f"{against - 1:+.2%}", f"{cpu - 1:+.2%}")
    return " | ".join((str(turn.taken), *cells, *shares, f"{each:.0f} ({turn.measured_cost() * 1000:.0f})"))


def main() -> None:
    """Measure and print."""
    configure(TrainConfig(synthetic=True))
    group = connect(rank_info_from(os.environ))
    name = tempfile.mkdtemp(prefix="torchrelay-benchmark-", dir=_MEMORY) if group.is_rank_zero else ""
    directory = Path(group.all_gather_json(name)[0])
    if group.is_rank_zero:
        print(f"{group.world_size} ranks on {group.device}; {ROUNDS} windows of about {WINDOW_SECONDS:.0f} s each\n")
        print("| model | MB | --snapshot-every | taken | images/s | least | most | against off | CPU time | ms each |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    try:
        for case in CASES:
            run(case, group, directory)
    finally:
        if group.is_rank_zero:
            shutil.rmtree(directory)
        disconnect()


if __name__ == "__main__":
    main()
