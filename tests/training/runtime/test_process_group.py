"""Collectives between real processes."""

import os
import sys
from typing import Any

import pytest
import torch
from support.trainings import Starter
from torch import Tensor, distributed
from torchrelay import rank_exchange

from training.runtime.process_group import connect, disconnect
from training.runtime.run_context import rank_info_from

VALUES = [{"accuracy": 0.1 + 0.2, "path": "ä\udcff"}, None, [1, [2, "x" * 1000]]]


def sent_tensors() -> dict[str, Tensor]:
    """Each with what may get lost: a type, the bits of a NaN, a memory format, one that is empty or larger than 64."""
    generator = torch.Generator().manual_seed(1)
    return {
        "weights": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        "step": torch.tensor(3.0),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "nan": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        "count": torch.tensor(2**60),
        "none": torch.empty(0, 5),
        "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
    }


def exchange() -> None:
    """In a rank: have the values of all, and receive the tensors of rank 0 in buckets of 64 bytes."""
    rank_exchange._BUCKET_BYTES = 64  # noqa: SLF001
    group, sent, sizes = connect(rank_info_from(os.environ)), sent_tensors(), list[int]()
    assert group.all_gather_json(VALUES[group.rank]) == VALUES
    broadcast = distributed.broadcast

    def measure(tensor: Tensor, source: int, **options: Any) -> Any:
        sizes.append(tensor.nbytes)
        return broadcast(tensor, source, **options)

    distributed.broadcast = measure
    received = dict(group.broadcast_tensors(sent if group.rank == 0 else {"ignored": torch.zeros(9)}))
    disconnect()
    assert received.keys() == sent.keys()
    for name, value in sent.items():
        assert (received[name].dtype, received[name].shape) == (value.dtype, value.shape), name
        same = torch.equal(received[name].contiguous().flatten().view(torch.uint8), value.flatten().view(torch.uint8))
        assert same, name
    *buckets, largest = sorted(sizes[2:])  # without names, shapes and dtypes, and the size of these
    assert largest == sent["weights"].nbytes
    assert all(size <= 64 for size in buckets)
    sys.exit(0)


def test_every_rank_has_the_values_of_all_and_receives_the_tensors_of_one_bit_by_bit(start: Starter) -> None:
    training = start(world_size=3, prepare=exchange)
    assert training.wait() == [0, 0, 0], training.output()


def remove_the_unpickler() -> None:
    from torch.distributed import distributed_c10d

    del distributed_c10d._unpickler  # noqa: SLF001


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nothing_is_unpickled_in_a_training(start: Starter, strategy: str) -> None:
    """Neither by the trainer nor by what it uses of torch."""
    flags = ("--epochs=2", "--batch-size=64", f"--strategy={strategy}")
    start.complete(*flags, world_size=2, prepare=remove_the_unpickler)
