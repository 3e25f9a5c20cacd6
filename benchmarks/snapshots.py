"""What a snapshot costs a training on CPUs, for states of 1 MB to 1 GB, beside torch's own asynchronous checkpoints.

    .venv/bin/python -m benchmarks.snapshots

Each model is saved after every step in three ways: by the classifier, as a script's `state(model=..., optimizer=...)`
does it, and by `torch.distributed.checkpoint.async_save` to /dev/shm. The first models have one rank. The last one is
sharded by FSDP2 over 2 and 3 ranks, each on a node of its own as far as Torchrelay can tell; the nodes send each other
copies, which async_save does not. The table has medians, for rank 0:

- stall: milliseconds for which the training waits;
- cost: milliseconds of CPU time of the process until the state is written;
- written: milliseconds until the state is in the memory of the node, and of its neighbour;
- copy: milliseconds in which this machine copies as many bytes in memory, for comparison;
- every: seconds between two snapshots of the classifier with `--snapshot-every auto`.

Takes some minutes on two cores that nobody else uses.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torchrelay.rank_exchange import RankGroup
from torchrelay.saving.objects import Objects, capture
from torchrelay.saving.owner import Owner
from torchrelay.saving.state_writer import StateWriter

from benchmarks.harness import Findings, Flags, Row, benchmark
from benchmarks.speed.loops import Case
from benchmarks.speed.our_loop import our_trainer
from hpc.base.transport import pick_port
from hpc.run.nodedir import NodeDir
from training.config.rules import AUTO_OVERHEAD, parse_interval
from training.engine.trainer import Trainer
from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from

CASES = (
    Case(model="small-cnn", image_size=28, batch_size=2),
    Case(model="resnet20", image_size=32, batch_size=2),
    Case(model="resnet18", image_size=32, batch_size=2),
    Case(model="resnet101", image_size=32, batch_size=2),
    Case(model="vit_b_16", image_size=32, batch_size=2, optimizer="adamw"),
)
_NODES = (2, 3)
# The first saves into each of two files provide memory.
_UNCOUNTED = 2
Save = Callable[[int], Callable[[], object]]
"""Starts to save the state of a step, and returns a function that waits until it is written."""


@dataclass(frozen=True, kw_only=True)
class Options(Flags):
    """How much to measure."""

    snapshots: int = 10
    """Snapshots of each model."""
    width: int = 1024
    """Width of the transformer with FSDP2."""


def times_of(name: str, step: Callable[[], object], save: Save, count: int) -> Row:
    """Save after each of so many steps."""
    stalls, costs, written = list[float](), list[float](), list[float]()
    for number in range(1, _UNCOUNTED + count + 1):
        step()
        began, cpu_began = time.monotonic(), time.process_time()
        wait = save(number)
        stalls.append(time.monotonic() - began)
        wait()
        written.append(time.monotonic() - began)
        costs.append(time.process_time() - cpu_began)
    kinds = {"stall_ms": stalls, "cost_ms": costs, "written_ms": written}
    return {"saved_by": name} | {kind: round(median(found[_UNCOUNTED:]) * 1e3, 1) for kind, found in kinds.items()}


def by_script(writer: StateWriter) -> Save:
    """Save as a script does."""

    def save(step: int) -> Callable[[], object]:
        writer.save(step, durable=False)
        return writer.wait

    return save


def by_torch(model: nn.Module, optimizer: Optimizer, directory: Path) -> Save:
    """Save by async_save, and keep two states, as Torchrelay does."""

    def save(step: int) -> Callable[[], object]:
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            shutil.rmtree(directory / f"{step - 2}", ignore_errors=True)
        named, optimized = get_state_dict(model, optimizer)
        saved: Any = async_save(
            {"model": named, "optimizer": optimized}, checkpoint_id=directory / f"{step}",
            no_dist=not distributed.is_initialized(),
        )  # fmt: skip
        return saved.result  # type: ignore[no-any-return]  # of a future

    return save


class StrictOwner(Owner):
    """A script without a run, whose saves must not fail."""

    def warn(self, text: str) -> None:
        """Fail."""
        raise RuntimeError(text)


def script_writer(model: nn.Module, optimizer: Optimizer, peers: RankGroup, directory: Path) -> StateWriter:
    """Return a writer of snapshots as of `state(model=..., optimizer=...)`."""
    return StateWriter(
        peers=peers, objects=Objects.of_script({"model": model, "optimizer": optimizer}), checkpoints=None,
        snapshots=directory, keep=1, owner=StrictOwner(), attempt=1,
    )  # fmt: skip


# --- one rank ---


def rows_of(case: Case, count: int) -> list[Row]:
    """Train a model, and save it in each way."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as directory:
        group = connect(rank_info_from({}))
        trainer = our_trainer(case, group, Path(directory), NodeDir(Path(memory)), snapshot_every="1000000")
        trainer.stepper.warm_up(trainer.data.channels, trainer.data.size)
        trainer.resume()
        steps, state = trainer.steps(), trainer.state
        classifier = times_of("classifier", lambda: next(steps), by_classifier(trainer), count)
        auto = parse_interval("snapshot_every", "auto")["seconds"]
        every = round(max(auto, trainer.saver.writer.cost_seconds / AUTO_OVERHEAD), 1)
        trainer.saver.clear()
        writer = script_writer(state.model, state.optimizer, group, Path(memory) / "script")
        script = times_of("script", lambda: next(steps), by_script(writer), count)
        size_bytes = bytes_of(state.model, state.optimizer, group)
        shutil.rmtree(Path(memory) / "script")
        rival = times_of("async_save", lambda: next(steps), by_torch(state.model, state.optimizer, Path(memory)), count)
        trainer.logger.close()
        disconnect()
    rows = {**classifier, "every_s": every}, script, rival
    return [{**described(case.model, 1, size_bytes), **row} for row in rows]


def by_classifier(trainer: Trainer) -> Save:
    """Save as the classifier does."""

    def save(_step: int) -> Callable[[], object]:
        trainer.saver.save(durable=False)
        return trainer.saver.writer.wait

    return save


def bytes_of(model: nn.Module, optimizer: Optimizer, peers: RankGroup) -> int:
    """Return the bytes of what this rank holds. All ranks must call this."""
    return capture(Objects.of_script({"model": model, "optimizer": optimizer}), 0, peers).layout.size_bytes


def described(model: str, ranks: int, size_bytes: int) -> Row:
    """Return what was saved by a rank, with the median milliseconds of a copy of as many bytes in memory."""
    source, target, seconds = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8), []
    for _ in range(5):
        began = time.monotonic()
        target.copy_(source)
        seconds.append(time.monotonic() - began)
    return {
        "model": model, "ranks": ranks, "rank_mb": round(size_bytes / 1e6, 1),
        "copy_ms": round(median(seconds) * 1e3, 1),
    }  # fmt: skip


# --- FSDP2 ---


def sharded_rows(nodes: int, options: Options) -> list[Row]:
    """Save a sharded transformer, on as many nodes as ranks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(pick_port()), "WORLD_SIZE": str(nodes)}
        multiprocessing.spawn(sharded_rank, (place, Path(memory), options), nprocs=nodes)  # type: ignore[attr-defined,no-untyped-call]
        rows: list[Row] = json.loads((Path(memory) / "rows.json").read_text())
    return rows


def sharded_rank(rank: int, place: Mapping[str, str], memory: Path, options: Options) -> None:
    """Run one rank. Its memory is that of a node of its own."""
    os.environ |= {**place, "RANK": str(rank)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    world_size, width = distributed.get_world_size(), options.width
    control: Any = distributed.new_group(backend="gloo")
    peers = RankGroup(rank=rank, local_rank=0, world_size=world_size, control=control)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    mesh = init_device_mesh("cpu", (world_size,))
    for each in model.layers:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randn(1, 4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    def begin_together() -> None:
        step()
        distributed.barrier()

    writer = script_writer(model, optimizer, peers, memory / f"node-{rank}")
    script = times_of("script", begin_together, by_script(writer), options.snapshots)
    size_bytes = bytes_of(model, optimizer, peers)
    distributed.barrier()
    shutil.rmtree(memory / f"node-{rank}")
    rival = times_of("async_save", begin_together, by_torch(model, optimizer, memory / "torch"), options.snapshots)
    if rank == 0:
        name = f"transformer, {sum(each.numel() for each in model.parameters()) / 1e6:.0f} M, FSDP2"
        rows = [{**described(name, world_size, size_bytes), **row} for row in (script, rival)]
        (memory / "rows.json").write_text(json.dumps(rows))
    distributed.destroy_process_group()


def measure(options: Options) -> Findings:
    """Measure the models one after the other."""
    torch.set_num_threads(1)
    rows = [row for case in CASES for row in rows_of(case, options.snapshots)]
    return Findings(tables={"rows": [*rows, *(row for nodes in _NODES for row in sharded_rows(nodes, options))]})


if __name__ == "__main__":
    benchmark("snapshots", Options, measure, small={"snapshots": 3, "width": 128})
