"""Sends rank 0's list of files to all ranks, and checks that all ranks have the same data. Runs on every rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpc.base.errors import UserError
from training.config.dataset_layout import DataLayout
from training.config.train_config import TrainConfig
from training.data.dataset import Data
from training.data.file_index import load_or_build_index
from training.evaluation.final_files import spec_of
from training.runtime.process_group import ProcessGroup, SharedError
from training.runtime.run_context import RunContext

# Each worker's two batches take memory that snapshots need, too. No GPU trains faster than 32 workers decode.
_MAX_WORKERS = 32


@contextmanager
def user_paths(context: RunContext) -> Iterator[None]:
    """Make errors name the data that the user gave, instead of the copy of it on this node."""
    try:
        yield
    except UserError as error:
        typed = spec_of(context.run_dir).get("data") or context.config.data
        raise UserError(str(error).replace(context.config.data, typed)) from error


def shared_file_index(context: RunContext, group: ProcessGroup, layout: DataLayout | None) -> bytes:
    """Return rank 0's index of an image folder on every rank, or no bytes for other data. All ranks must call this.

    Raises SharedError if rank 0 cannot read the folder.
    """
    file_index = b""
    with group.raise_on_all_ranks():
        if group.is_rank_zero and layout and layout.kind == "image-folder":
            with user_paths(context):
                file_index = load_or_build_index(layout, context.run_dir.index, time.time_ns())
    return group.broadcast_bytes(file_index)


def loader_workers(config: TrainConfig, data: Data, group: ProcessGroup) -> int:
    """Return this rank's number of loader workers: --num-workers or its default, but 0 if images are on the device."""
    if data.on_device:
        return 0
    if config.num_workers is not None:
        return config.num_workers
    return 0 if data.cheap else min(group.cores, _MAX_WORKERS)


def check_same(data: Data, group: ProcessGroup) -> None:
    """Check that all ranks have the same images and labels. All ranks must call this.

    For an image folder, all ranks use rank 0's index. A file that another node lacks is noticed when it is read. Raises
    SharedError if a rank has other data.
    """
    data_of_ranks = group.all_gather_json([len(data.train), data.fingerprint])
    other = next((rank for rank, theirs in enumerate(data_of_ranks) if theirs != data_of_ranks[0]), None)
    if other is not None:
        raise SharedError(
            f"--data differs between nodes: rank 0 has {data_of_ranks[0][0]} training images, rank {other} has "
            f"{data_of_ranks[other][0]}, or their names or labels differ: stage the data again"
        )
