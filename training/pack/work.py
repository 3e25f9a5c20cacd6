"""The work of a packer, shared by its processes: find what is whole, make what is missing, complete it.

Runs in the packer's own process, and starts the work in the others; imports no torch.
"""

import hashlib
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from hpc.core.files import write_atomic
from training.config.packed_index import PackedFile, PackedPart, PackIndex, write_index
from training.pack.plan import PackPlan
from training.pack.progress import PackProgress
from training.pack.shard_writer import Packed, PackedRecord, Shard, begin, find, pack_images, seal
from training.runtime.signals import die_with_parent

# Enough for a process to be busy for some hundredths of a second.
_TOGETHER = 16
# Of what each process is to do next, so much is decided beforehand.
_AHEAD = 4

Records = dict[str, PackedRecord]
"""The records of whole shards, by the shard's name."""


def begin_worker() -> None:
    """Leave it to the packer to react to signals, and die with it."""
    die_with_parent((signal.SIGTERM, signal.SIGINT))


def whole_shards(plan: PackPlan, directory: Path, pool: ProcessPoolExecutor) -> Records:
    """What an earlier packer has left whole. A shard of images that have changed since is not: it is made again."""
    shards = plan.shards(directory)
    found = zip(shards, pool.map(find, shards), strict=True)
    return {shard.name: record for shard, record in found if record is not None}


def pack_shards(shards: Sequence[Shard], pool: ProcessPoolExecutor, workers: int, progress: PackProgress) -> Records:
    """Make shards.

    Raises:
        OSError: an image cannot be read, or the disk is full.
    """
    parts: list[Packed] = []
    sealed: dict[str, Future[PackedRecord]] = {}
    for shard, packed in _in_order(shards, pool, _AHEAD * workers):
        parts.append(packed)
        progress.advance(len(packed.stamps), list(map(shard.path_of, packed.corrupt)))
        if sum(len(part.stamps) for part in parts) == len(shard.paths):
            sealed[shard.name] = pool.submit(seal, shard, parts)
            parts = []
    return {name: future.result() for name, future in sealed.items()}


def _in_order(shards: Sequence[Shard], pool: ProcessPoolExecutor, most: int) -> Iterator[tuple[Shard, Packed]]:
    """Some images after the other; so many are under way that no process waits, and the end of a shard does not."""
    under_way: deque[tuple[Shard, Future[Packed]]] = deque()
    for shard in shards:
        begin(shard)
        for start in range(0, len(shard.paths), _TOGETHER):
            stop = min(start + _TOGETHER, len(shard.paths))
            under_way.append((shard, pool.submit(pack_images, shard, start, stop)))
            if len(under_way) >= most:
                first, future = under_way.popleft()
                yield first, future.result()
    for shard, future in under_way:
        yield shard, future.result()


def complete(plan: PackPlan, directory: Path, records: Records) -> PackIndex:
    """Write the labels and names, and at last the index."""
    index = PackIndex(
        size=plan.size,
        shard_images=plan.shard_images,
        classes=plan.classes,
        parts=tuple(_part(plan, name, directory, records) for name in plan.parts),
        source=str(plan.source),
    )
    write_index(directory, index)
    return index


def _part(plan: PackPlan, name: str, directory: Path, records: Records) -> PackedPart:
    shards = [records[shard.name] for shard in plan.shards_of(name, directory)]
    tables = {what: _write(directory / f"{name}-{what}.npy", content) for what, content in plan.tables(name).items()}
    return PackedPart(
        name=name,
        images=len(plan.parts[name].names),
        corrupt=tuple(place for record in shards for place in record.corrupt),
        shards=tuple(record.file for record in shards),
        **tables,
    )


def _write(path: Path, content: bytes) -> PackedFile:
    write_atomic(path, content)
    return PackedFile(name=path.name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
