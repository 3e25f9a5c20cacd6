"""Saves and loads states in shards (`--strategy fsdp`). A rank can load its shards from files of any number of ranks.

Runs on every rank. The files are safetensors in the format of torch's distributed checkpoints (DCP): each file says
where its shards begin in the full tensors. DCP reads the files. It does not write them, because its writer would make
another copy, and would first let the ranks agree on who writes what, although that is fixed here.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, serialize_file
from safetensors.torch import load_file
from torch import Tensor
from torchrelay.checkpoint_files import WriteFiles, describe_file, save_checkpoint

from hpc.base.errors import TorchrelayError
from hpc.base.files import fsync_file
from hpc.run.rundir import STATE_TENSORS
from training.checkpoint.state import TrainState
from training.runtime.compat import shard_offsets
from training.runtime.process_group import ProcessGroup

# Keys that torch.distributed.checkpoint.HuggingFaceStorageReader expects.
_SHARDS, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
SHARD_SUFFIX = ".safetensors"


def shard_name(group: ProcessGroup) -> str:
    """Return the name of the file for this rank's shards."""
    return f"state-{group.rank:05d}-of-{group.world_size:05d}{SHARD_SUFFIX}"


def shard_file(snapshot: Path) -> Path:
    """Return the file of the shards in a rank's snapshot. Raises OSError if there is none."""
    for file in snapshot.glob(f"*{SHARD_SUFFIX}"):
        return file
    raise FileNotFoundError(f"{snapshot} has no file of shards")


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The part of a state that a rank holds, by default the whole state."""

    file: str = STATE_TENSORS
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each sharded tensor, by name, the offset of the rank's shard in each dimension. Others are replicated."""
    is_copy: bool = False
    """Whether a rank of another node holds the same shards, and writes them (--fsdp-sharding hybrid)."""

    def write(self, tensors: Mapping[str, TensorSpec], directory: Path, *, replicated: bool) -> None:
        """Write the rank's shards to a file in `directory`, with the replicated tensors if `replicated`.

        Raises:
            OSError: the file cannot be written, such as on a full disk.
        """
        own = () if self.is_copy else self.offsets
        wanted = {name: value for name, value in tensors.items() if replicated or name in own}
        offsets = {name: {_OFFSETS: self.offsets.get(name, [0] * len(value.shape))} for name, value in wanted.items()}
        header = None if self.file == STATE_TENSORS else {_SHARDS: json.dumps(offsets)}
        try:
            serialize_file(wanted, directory / self.file, header)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def local_shards(tensors: Mapping[str, Tensor], group: ProcessGroup) -> tuple[dict[str, Tensor], ShardLayout]:
    """Return the shards and replicated tensors that this rank holds, on its device, and their layout."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # takes a second, which DDP saves

    sharded: dict[str, Any] = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    offsets = {name: shard_offsets(value) for name, value in sharded.items()}
    # The mesh's last dimension shards. With --fsdp-sharding hybrid, the dimension before it replicates.
    is_copy = any(any(value.device_mesh.get_coordinate()[:-1]) for value in sharded.values())
    shards = {name: _local(value) for name, value in tensors.items()}
    return shards, ShardLayout(file=shard_name(group), offsets=offsets, is_copy=is_copy)


def _local(tensor: Any) -> Tensor:
    """Return this rank's shard of a sharded tensor, or a replicated tensor itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


# --- reading ---


def read_own_shards(snapshot: Path, state: TrainState) -> dict[str, Tensor]:
    """Read this rank's shards and replicated tensors from a snapshot of the same shards."""
    saved = load_file(shard_file(snapshot))
    allocate = state.allocator(lambda tensor: _local(tensor).shape)
    tensors = {name: allocate(name, value) for name, value in saved.items()}
    for name, value in saved.items():
        _local(tensors[name]).copy_(value)
    return tensors


def read_shards(directory: Path, state: TrainState) -> dict[str, Tensor]:
    """Read this rank's shards of a state from any number of shard files, or from one full file."""
    return _load(directory, state.allocator())


def read_full(directory: Path) -> dict[str, Tensor]:
    """Read the full tensors of a state into host memory. A single full file is memory-mapped."""
    if (directory / STATE_TENSORS).exists():
        return load_file(directory / STATE_TENSORS)
    return _load(directory, lambda _name, like: torch.empty_like(like, device="cpu"))


def _load(directory: Path, allocate: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Load tensors into memory from `allocate`, which gets a name and a meta tensor of the saved shape and dtype."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415  # takes a second
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: PLC0415  # takes a second
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    found: Mapping[str, Any] = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    tensors = {
        name: allocate(name, torch.empty(value.size, dtype=value.properties.dtype, device="meta"))
        for name, value in found.items()
    }
    with warnings.catch_warnings():
        # DCP would warn that a rank loads its shards without the other ranks (`no_dist`).
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
        except CheckpointException as error:  # which is no Exception
            raise OSError(f"{directory} cannot be read: {error}") from error
    return tensors


# --- writing ---


def save_sharded(
    group: ProcessGroup, directory: Path, step: int, write_files: WriteFiles, keep: int | None,
    *, check: Callable[[], None],
) -> None:  # fmt: skip
    """Write a checkpoint as `save_checkpoint` does, with a file of each rank. All ranks must call this.

    Rank 0 makes the directory and publishes it. `write_files` writes the file of a rank's shards, and on rank 0 also
    the other files. All ranks must see the same storage. Nothing else may use `group.control` meanwhile.

    Raises:
        OSError: on all ranks, if a rank could not write. All older checkpoints are kept.
        TorchrelayError: on rank 0, from `check`; the other ranks then raise OSError.
    """
    failure: Exception | None = None
    if group.is_rank_zero:
        try:
            save_checkpoint(directory, step, partial(_write_on_all_ranks, group, write_files), keep, check=check)
        except (OSError, TorchrelayError) as error:
            failure = error
        # An empty path ends the loop below, on the other ranks. Send it even if rank 0 failed before it sent any path.
        group.broadcast_bytes(b"")
    else:
        while temporary := group.broadcast_bytes(None):
            group.all_gather_json(_write_own(group, write_files, Path(os.fsdecode(temporary))))
    problem = group.all_gather_json(str(failure) or repr(failure) if failure else "")[0]
    if problem:
        raise failure or OSError(problem)


def _write_on_all_ranks(group: ProcessGroup, write_files: WriteFiles, temporary: Path) -> dict[str, Any]:
    """Have all ranks write into a directory, and return the manifest's entries for their files. Runs on rank 0."""
    group.broadcast_bytes(os.fsencode(temporary))
    results = group.all_gather_json(_write_own(group, write_files, temporary))
    problem = next((problem for _, problem in results if problem), "")
    if problem:
        raise OSError(problem)
    return {name: entry for entries, _ in results for name, entry in entries.items()}


def _write_own(group: ProcessGroup, write_files: WriteFiles, temporary: Path) -> tuple[dict[str, Any], str]:
    """Write this rank's shards durably, and return their manifest entry and an error message or `""`."""
    name = shard_name(group)
    try:
        write_files(temporary)
        fsync_file(temporary / name)
        return {name: describe_file(temporary / name)}, ""
    except OSError as error:
        return {}, f"rank {group.rank}: {str(error) or repr(error)}"
