"""Puts a training together and runs it. Runs on every rank, after torch may be imported."""

import gc
import os
import time
from dataclasses import asdict, replace

import torch

from training.config.dataset_layout import DataLayout, check_data, resolve_data
from training.config.rules import check_validation
from training.config.train_config import check_world
from training.data.build import load_data, synthetic_data
from training.data.dataset import Data
from training.data.device_dataset import move_to_device
from training.data.file_index import load_or_build_index
from training.engine.preflight import check
from training.engine.trainer import Trainer
from training.models.factory import FORMATS, Preprocess, build_model, input_channels, input_size
from training.models.sync_batch_norm import convert_sync_batch_norm
from training.runtime.process_group import ProcessGroup, SharedError, connect, disconnect
from training.runtime.run_context import RankInfo, RunContext

_MOST_WORKERS = 8


def launch(context: RunContext, rank_info: RankInfo) -> None:
    """Train with all other ranks, from connecting to disconnecting.

    Raises:
        UserError: a flag, the data or the run directory does not suit.
        UnfitNodeError: this rank's node cannot train.
        TorchrelayError: the training failed.
    """
    make_repeatable(everything=context.config.deterministic)
    group = connect(rank_info, watched=context.node_dir is not None)
    context.heartbeat.beat("start")
    # After an error there is no leaving in good order: it waits for ranks that may be no more.
    if not _is_complete(context, group):
        report = check(group, context.fault)
        trainer = make_trainer(context, group)
        trainer.logger.event("preflight", **asdict(report))
        # What there is now stays to the end: no need to look through it, and for loader workers to get copies of it.
        gc.freeze()
        gc.enable()
        trainer.run()
    disconnect()


def make_repeatable(*, everything: bool) -> None:
    """Have the same sums in the same order every time; the fastest algorithm of the day is not that.

    That fixes convolutions and matrix products (with CUBLAS_WORKSPACE_CONFIG, `training.__main__`). With
    `everything`, what cannot be repeated raises a RuntimeError instead.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(mode=everything)
    # Nothing reads memory that it has not written: filling it first would cost time for nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made when it is asked for


def _is_complete(context: RunContext, group: ProcessGroup) -> bool:
    """Whether there is nothing left to do: as rank 0 sees it, for the others' view of shared storage may be older."""
    complete = any(group.all_gather_object(group.is_rank_zero and context.run_dir.final_result.exists()))
    if complete and group.is_rank_zero:
        print(f"{context.run_dir.path} is complete already: {context.run_dir.final_result}", flush=True)
    return complete


def make_trainer(context: RunContext, group: ProcessGroup) -> Trainer:
    """Open the data and build the model.

    Raises:
        SharedError: a flag or the data do not suit, on some rank; every rank raises it.
    """
    config = context.config
    with group.raise_on_all_ranks():
        check_world(config, group.world_size)
        layout = None if config.synthetic else check_data(resolve_data(config.data))
    file_index = _share_file_index(layout, context, group)
    context.heartbeat.beat("start")
    with group.raise_on_all_ranks():
        side = input_size(config, None)
        data = load_data(config, layout, side, file_index) if layout else synthetic_data(config, side)
        size = input_size(config, data.size if data.in_memory else None)
        channels = input_channels(config, data.channels)
        model = build_model(config, classes=len(data.classes), channels=channels, size=size)
        data = move_to_device(config, data, group.device)
    context.heartbeat.beat("start")
    if config.sync_bn:
        model = convert_sync_batch_norm(model, group.device)
    _check_same(data, group)
    with group.raise_on_all_ranks():
        check_world(config, group.world_size, len(data.train))
        check_validation(config, validates=data.val is not None)
    preprocess = Preprocess.make(data.mean, data.std, channels, size, group.device)
    preprocess = replace(preprocess, memory_format=FORMATS[config.memory_format])
    return Trainer(context, group, data, model, preprocess, _workers(config.num_workers, data, group.rank_info))


def _share_file_index(layout: DataLayout | None, context: RunContext, group: ProcessGroup) -> bytes:
    """The list of an image folder's images: rank 0 alone looks for them, and the others believe it."""
    file_index = b""
    with group.raise_on_all_ranks():
        if group.is_rank_zero and layout and layout.kind == "image-folder":
            file_index = load_or_build_index(layout, context.run_dir.index, time.time_ns())
    return group.broadcast_bytes(file_index)


def _check_same(data: Data, group: ProcessGroup) -> None:
    """Every node has a copy of the data: make sure that they are the same.

    Of an image folder all know rank 0's list; an image that another node lacks is missed when it is to be read.
    """
    prints = group.all_gather_object((len(data.train), data.fingerprint))
    other = next((rank for rank, found in enumerate(prints) if found != prints[0]), None)
    if other is not None:
        raise SharedError(
            f"--data is not the same everywhere: rank 0 has {prints[0][0]} training images, rank {other} "
            f"{prints[other][0]}, or other names or labels: stage the data again"
        )


def _workers(wanted: int | None, data: Data, rank_info: RankInfo) -> int:
    """Loader workers of a rank: its share of the node's cores, unless there is next to nothing to do.

    What lies on a device is out of a worker's reach, and needs none.
    """
    if data.on_device:
        return 0
    if wanted is not None:
        return wanted
    if data.cheap:
        return 0
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // rank_info.local_world_size)
