"""Connects the ranks, opens the data, and trains or evaluates a model. Runs on every rank; imports torch."""

import gc
from dataclasses import asdict, replace

from msgspec import convert
from torch import nn

from hpc.base.kernel import MOST_FREED_BYTES, keep_freed_memory
from hpc.run.events.kinds import Preflight, Software
from training.config.dataset_layout import check_data, resolve_data
from training.config.model_names import OWN_MODELS, TIMM
from training.config.rules import check_device, check_validation
from training.config.train_config import check_world, needs_compiler
from training.data.build import load_data, move_to_device, synthetic_data
from training.engine.evaluation_run import EvaluationRun
from training.engine.preflight import run_preflight
from training.engine.shared_data import check_same, loader_workers, shared_file_index, user_paths
from training.engine.trainer import Trainer
from training.models.factory import Preprocess, build_model, input_size, per_channel, timm_settings
from training.runtime.determinism import configure, configure_attention
from training.runtime.process_group import ProcessGroup, connect, disconnect
from training.runtime.run_context import RankInfo, RunContext
from training.runtime.software import versions
from training.runtime.without_compiler import leave_out_compiler

# Keeps the objects that use DDP alive until the process ends, so that DDP's destructor never runs. The destructor holds
# Python's lock while it joins a gloo thread, which may wait for the lock: one in ten stopped ranks hung (torch 2.11).
_ALIVE: list[EvaluationRun | Trainer] = []


def launch(context: RunContext, rank_info: RankInfo) -> None:
    """Train or evaluate together with all other ranks, from connecting to disconnecting.

    Raises:
        UserError: a flag, the data or the run directory is wrong.
        BadNodeError: this rank's node cannot train.
        TorchrelayError: the training failed.
    """
    keep_freed_memory(MOST_FREED_BYTES)
    if not needs_compiler(context.config):
        leave_out_compiler()
    configure(context.config)
    group = connect(rank_info, watched=context.node_dir is not None)
    context.heartbeat.beat("start")
    # Rank 0 decides whether the run is complete: the other ranks' view of shared storage may be older.
    is_complete = any(group.all_gather_json(group.is_rank_zero and context.run_dir.final_result.exists()))
    if is_complete and group.is_rank_zero:
        print(f"{context.run_dir.path} is already complete: {context.run_dir.final_result}", flush=True)
    if not is_complete:
        report = run_preflight(group, context.fault)
        evaluation = context.evaluation
        work = EvaluationRun(context, group, evaluation) if evaluation else make_trainer(context, group)
        _ALIVE.append(work)
        work.logger.event(Preflight(**asdict(report)))
        work.logger.event(convert(versions(), Software))
        # The present objects live to the end. Freezing them saves the garbage collector's time. It also keeps the
        # collector from writing to their pages, which each loader worker would then have to copy.
        gc.freeze()
        gc.enable()
        work.run()
    # Not in a `finally`: after an error, disconnecting would wait for ranks that may be dead.
    disconnect()


def make_trainer(context: RunContext, group: ProcessGroup) -> Trainer:
    """Open the data, build the model, and return their trainer. SharedError on every rank if one fails."""
    config = context.config
    with group.raise_on_all_ranks(), user_paths(context):
        check_world(config, group.world_size)
        check_device(config, has_gpus=group.device.type == "cuda")
        layout = None if config.synthetic else check_data(resolve_data(config.data))
    file_index = shared_file_index(context, group, layout)
    context.heartbeat.beat("start")
    with group.raise_on_all_ranks():
        side = input_size(config, None)
        data = load_data(config, layout, side, file_index) if layout else synthetic_data(config, side)
        if layout and not data.in_memory and config.model.startswith(TIMM):
            settings = timm_settings(config.model)
            data = replace(data, mean=tuple(settings.mean), std=tuple(settings.std))
        size = input_size(config, data.size if data.in_memory else None)
        channels = data.channels if config.model in OWN_MODELS else 3
        model = build_model(config, classes=len(data.classes), channels=channels, size=size)
        configure_attention(model)
        data = move_to_device(config, data, group.device)
    context.heartbeat.beat("start")
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's own
    check_same(data, group)
    with group.raise_on_all_ranks():
        check_world(config, group.world_size, len(data.train))
        check_validation(config, validates=data.val is not None)
    preprocess = Preprocess(
        mean=per_channel(data.mean, group.device), std=per_channel(data.std, group.device),
        channels=channels, size=size, interpolation=config.interpolation,
    )  # fmt: skip
    return Trainer(context, group, data, model, preprocess, loader_workers(config, data, group))
