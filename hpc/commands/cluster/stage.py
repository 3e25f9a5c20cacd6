"""`hpc stage`: copy data sets to this machine's disk, list, verify and delete the copies. Runs on any node.

Node agents stage by themselves; this verb shows, verifies and deletes copies, and makes them for work without a run.
"""

import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

from hpc.base.errors import TorchrelayError, UserError
from hpc.commands import cli
from jobs.staging.copy_progress import CopyProgress
from jobs.staging.source import absolute, list_source
from jobs.staging.stager import Staged, Stager
from jobs.staging.store import CacheEntry, CacheStore, available_bytes, open_store

_INTACT = "intact"
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class StageOptions(cli.Common):
    """Copy data to this machine's own disk, where runs find the copy; or list, verify or delete such copies."""

    path: tyro.conf.Positional[Path | None] = None
    """Directory, or .tar, .tar.gz, .tar.bz2, .tar.xz, .tar.zst or .zip archive."""
    stage_dir: Path = Path("/tmp")  # noqa: S108 - the directory below it is private
    """Directory on this machine's own disk."""
    list: bool = False
    """List the copies."""
    verify: bool = False
    """Read all copies, or only those of PATH, in full, compare the checksums, and make damaged ones again."""
    clean: bool = False
    """Delete all copies, or only those of PATH, except copies in use."""


def stage(options: StageOptions) -> int:
    """Copy the data, or list, verify or delete copies."""
    if sum((options.list, options.verify, options.clean)) > 1:
        raise UserError("--list, --verify and --clean exclude each other: give only one of them")
    store = open_store(options.stage_dir.absolute())
    if options.clean:
        return _clean(options, store)
    if options.verify:
        return _verify(options, store)
    if options.list:
        return _list(options, store)
    if options.path is None:
        raise UserError("nothing to copy: give a directory or an archive, or --list to see the copies")
    staged = _copy(options, absolute(options.path))
    if options.json:
        cli.print_json({**asdict(staged), "path": str(staged.path)})
    elif staged.in_place:
        print(f"not copied: {staged.in_place}")
    else:
        how = "reused" if staged.reused else f"{decimal(staged.bytes_from_source)} in {staged.seconds:.1f} s"
        print(f"{staged.path} ({how})")
        if staged.shared:
            print(f"{options.stage_dir} is not on this machine's own disk: {staged.shared}")
        if staged.in_memory:
            available = decimal(available_bytes(options.stage_dir))
            print(f"{options.stage_dir} is RAM-backed: the copy takes memory; {available} remain available for copies")
    return int(staged.in_place is not None)


def _chosen(options: StageOptions, store: CacheStore) -> list[CacheEntry]:
    if options.path is None:
        return store.entries()
    source = str(absolute(options.path))
    return [entry for entry in store.entries() if (manifest := entry.manifest()) and manifest.source == source]


def _describe(entry: CacheEntry) -> dict[str, Any]:
    manifest = entry.manifest()
    return {
        "path": str(entry.data),
        "source": manifest.source if manifest else None,
        "files": len(manifest.files) if manifest else None,
        "bytes": manifest.size if manifest else None,
        "used_at": entry.used_at,
        "in_use": entry.in_use(),
    }


def _list(options: StageOptions, store: CacheStore) -> int:
    copies = [_describe(entry) for entry in _chosen(options, store)]
    if options.json:
        cli.print_json(copies)
        return 0
    if not copies:
        print(f"you have no copies in {options.stage_dir}")
        return 0
    source, copied = Column("source", overflow="fold"), Column("copy", overflow="fold")
    files, size = Column("files", justify="right"), Column("size", justify="right")
    table = Table(source, files, size, "last used", copied, box=None, pad_edge=False)
    for copy in copies:
        used = "now" if copy["in_use"] else time.strftime("%Y-%m-%d %H:%M", time.localtime(copy["used_at"]))
        total = decimal(copy["bytes"]) if copy["bytes"] is not None else "-"
        cells = (copy["source"] or "-", str(copy["files"] or "-"), total, used, copy["path"])
        table.add_row(*map(escape, cells))
    Console().print(table)
    return 0


def _clean(options: StageOptions, store: CacheStore) -> int:
    deleted, in_use = list[dict[str, Any]](), list[dict[str, Any]]()
    for entry in _chosen(options, store):
        described = _describe(entry)
        (deleted if entry.delete() else in_use).append(described)
    if options.json:
        cli.print_json({"deleted": deleted, "in_use": in_use})
    else:
        freed = decimal(sum(copy["bytes"] or 0 for copy in deleted))
        print(f"deleted {len(deleted)} copies, {freed}" + (f"; {len(in_use)} are in use" if in_use else ""))
    return 0


def _verify(options: StageOptions, store: CacheStore) -> int:
    """Verify the copies. Copy damaged ones again, or delete them if their source is gone or has changed."""
    checks = [_check(options, entry) for entry in _chosen(options, store)]
    if options.path and not checks:
        raise UserError(f"{options.stage_dir} has no copy of {options.path}: type hpc stage {options.path} to make one")
    if options.json:
        cli.print_json(checks)
    for check in [] if options.json else checks:
        names = ", ".join(check["damaged"][:3]) + (" ..." if len(check["damaged"]) > 3 else "")
        print(f"{check['source']}: " + (f"damaged: {names}; " if names else "") + check["result"])
    return int(any(check["result"] != _INTACT for check in checks))


def _check(options: StageOptions, entry: CacheEntry) -> dict[str, Any]:
    manifest, in_use = entry.manifest(), entry.lock_for_use()
    try:
        if manifest is None or in_use is None:
            result = "not verified: it is being made or deleted"
            return {"path": str(entry.data), "source": entry.name, "damaged": [], "result": result}
        with entry.locked_for_copy(lambda: time.sleep(_POLL_SECONDS)):
            damaged = entry.find_damaged(manifest, lambda: False, read_all=True)
    finally:
        if in_use is not None:
            os.close(in_use)
    result = _repair(options, entry, Path(manifest.source)) if damaged else _INTACT
    return {"path": str(entry.data), "source": manifest.source, "damaged": damaged, "result": result}


def _repair(options: StageOptions, entry: CacheEntry, source: Path) -> str:
    """Copy a damaged copy again, or delete it. Returns a sentence about the result."""
    try:
        if list_source(source).version == entry.name:
            entry.distrust()
            if _copy(options, source).path == entry.data:
                return "repaired"
    except TorchrelayError:
        pass  # the source is gone
    if not entry.delete():
        return "still damaged: a run reads it, so cancel that run first"
    return "deleted: its source is gone or has changed, or it was a packed data set; the next run creates it again"


def _copy(options: StageOptions, source: Path) -> Staged:
    console = Console(stderr=True, quiet=options.json)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("listing", total=None)

        def watch(progress: CopyProgress | None) -> bool:
            if progress is not None:
                done, total = progress.bytes_done, progress.bytes_total
                bar.update(task, description=progress.activity, total=total, completed=done)
            return False

        with Stager(options.stage_dir.absolute(), watch=watch) as stager:
            return stager.stage(source)


main = partial(cli.run, stage, StageOptions, "stage")
