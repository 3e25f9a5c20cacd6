"""What some ranks have saved, others restore, however the tensors are cut then."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support.relay_script import StrictOwner
from support.trainings import Starter, slow
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torchrelay.checkpoint_files import list_checkpoints
from torchrelay.saving.objects import Objects
from torchrelay.saving.restoring import Restorer, read_state
from torchrelay.saving.state_writer import StateWriter

from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.run_context import rank_info_from

Cuts = tuple[Placement, ...]


def wholes() -> dict[str, Tensor]:
    """Tensors that few numbers of ranks can cut evenly."""
    generator = torch.Generator().manual_seed(1)
    return {
        "odd": torch.randn(7, 5, generator=generator),
        "rows": torch.randn(2, 3, 4, generator=generator).bfloat16(),
        "one": torch.randn(1, 9, generator=generator),
        "empty": torch.empty(0, 4),
        "count": torch.tensor(2**60),
    }


class Sharded(nn.Module):
    """Holds the tensors as ranks on a mesh cut them."""

    def __init__(self, mesh: tuple[int, ...], cuts: Cuts, content: dict[str, Tensor]) -> None:
        super().__init__()
        names = ("copies", "parts")[-len(mesh) :]
        ranks = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        for name, value in content.items():
            fitting = [cut if not isinstance(cut, Shard) or cut.dim < value.ndim else Replicate() for cut in cuts]
            self.register_buffer(name, distribute_tensor(value, ranks, fitting))


def node_of(directory: Path, group: ProcessGroup) -> Path:
    """The memory of this rank's node. Each has two ranks."""
    return directory / f"node-{group.rank // 2}"


def connected() -> ProcessGroup:
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    return connect(rank_info_from(os.environ))


def save(directory: Path, mesh: tuple[int, ...], cuts: Cuts) -> None:
    """In a rank: save the tensors as a checkpoint and a snapshot."""
    group = connected()
    objects = Objects(shared={"model": Sharded(mesh, cuts, wholes())})
    writer = StateWriter(
        peers=group, objects=objects, checkpoints=directory / "checkpoints", snapshots=node_of(directory, group),
        keep=2, owner=StrictOwner(), attempt=1,
    )  # fmt: skip
    for step in (1, 2):
        writer.save(step, durable=step == 1)
        writer.wait()
    disconnect()
    sys.exit(0)


def restore(directory: Path, mesh: tuple[int, ...], cuts: Cuts, source: str) -> None:
    """In a rank: restore the newest state into tensors that are cut in another way."""
    group, expected = connected(), wholes()
    model = Sharded(mesh, cuts, {name: torch.zeros_like(value) for name, value in expected.items()})
    restored = Restorer(
        peers=group, checkpoints=directory / "checkpoints", snapshots=node_of(directory, group),
        objects=Objects(shared={"model": model}), owner=StrictOwner(),
    ).restore()  # fmt: skip
    assert restored
    assert restored.source == source
    for name, tensor in model.named_buffers():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    disconnect()
    sys.exit(0)


ROWS = ((4,), (Shard(0),))
HYBRID = ((2, 2), (Replicate(), Shard(0)))
BOTH = ((2, 2), (Shard(0), Shard(1)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BOTH, ((3,), (Shard(0),))),
        (ROWS, BOTH),
        slow(HYBRID, ((1, 3), (Replicate(), Shard(1)))),
        slow(((4,), (Replicate(),)), ROWS),
    ],
)
def test_tensors_are_cut_anew_for_another_number_and_mesh_of_ranks(
    start: Starter, tmp_path: Path, before: tuple[tuple[int, ...], Cuts], after: tuple[tuple[int, ...], Cuts]
) -> None:
    saved = start(world_size=4, prepare=partial(save, tmp_path, *before))
    assert saved.wait() == [0] * 4, saved.output()
    tensors, _ = read_state(list_checkpoints(tmp_path / "checkpoints")[0])
    assert not [name for name, value in wholes().items() if not torch.equal(tensors[f"model/{name}"], value)]
    ranks = torch.Size(after[0]).numel()
    for source in ("snapshot", "checkpoint"):
        restored = start(world_size=ranks, prepare=partial(restore, tmp_path, *after, source))
        assert restored.wait() == [0] * ranks, restored.output()
        for node in tmp_path.glob("node-*"):
            node.rename(tmp_path / f"lost-{source}-{node.name}")
