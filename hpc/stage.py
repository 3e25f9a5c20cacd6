"""`hpc stage`: the copies of data sets on this machine, by hand. Runs where it is typed, which is best a compute node.

An agent stages by itself; this is for looking, for mending, for making room, and for work without a run.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from hpc import cli
from hpc.core.errors import TorchrelayError, UserError
from hpc.staging.progress import CopyProgress
from hpc.staging.source import absolute, list_source
from hpc.staging.stager import Staged, Stager
from hpc.staging.store import CacheEntry, CacheStore, available_bytes, open_store

_WHOLE = "whole"
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class StageOptions(cli.Common):
    """Copy data to this machine's own disk, where runs find them; look at the copies, check them, delete them."""

    path: tyro.conf.Positional[Path | None] = None
    """Directory, or .tar, .tar.gz, .tar.zst or .zip archive."""
    stage_dir: Path = Path("/tmp")  # noqa: S108 - the directory below it is private
    """Directory on this machine's own disk."""
    list: bool = False
    """List the copies that are there."""
    verify: bool = False
    """Read every byte of the copy, or of all copies, compare, and mend what is damaged."""
    clean: bool = False
    """Delete the copies, or those of PATH, that nobody reads."""


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    return cli.run(stage, StageOptions, argv, "stage")


def stage(options: StageOptions) -> int:
    """Do what the flags say, by default copy."""
    if sum((options.list, options.verify, options.clean)) > 1:
        raise UserError("--list, --verify and --clean are three things to do: give one of them")
    store = open_store(options.stage_dir.absolute())
    if options.clean:
        return _clean(options, store)
    if options.verify:
        return _verify(options, store)
    if options.list:
        return _tell(options, [_describe(entry) for entry in _chosen(options, store)])
    if options.path is None:
        raise UserError("what is to be copied? Give a directory or an archive, or --list to see what is there")
    return _answer(options, _stage(options, absolute(options.path), read=False))


def _chosen(options: StageOptions, store: CacheStore) -> Sequence[CacheEntry]:
    """The copies of PATH, or all."""
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


def _tell(options: StageOptions, copies: Sequence[dict[str, Any]]) -> int:
    if options.json:
        cli.print_json(copies)
        return 0
    if not copies:
        print(f"no copies of yours in {options.stage_dir}")
        return 0
    table = Table(box=None, pad_edge=False)
    for title, justify in (("source", "left"), ("files", "right"), ("size", "right"), ("last used", "left")):
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("copy", overflow="fold")
    for known in copies:
        used = "now" if known["in_use"] else time.strftime("%Y-%m-%d %H:%M", time.localtime(known["used_at"]))
        size = decimal(known["bytes"]) if known["bytes"] is not None else "-"
        cells = (known["source"] or "-", str(known["files"] or "-"), size, used, known["path"])
        table.add_row(*map(escape, cells))
    Console().print(table)
    return 0


def _clean(options: StageOptions, store: CacheStore) -> int:
    copies = [(entry, _describe(entry)) for entry in _chosen(options, store)]
    deleted = [described for entry, described in copies if entry.delete()]
    kept = [described for _, described in copies if described not in deleted]
    if options.json:
        cli.print_json({"deleted": deleted, "in_use": kept})
    else:
        freed = decimal(sum(known["bytes"] or 0 for known in deleted))
        print(f"deleted {len(deleted)} copies, {freed}" + (f"; {len(kept)} are in use" if kept else ""))
    return 0


def _verify(options: StageOptions, store: CacheStore) -> int:
    """Check and mend; what cannot be mended, because its source is gone or another one, is deleted."""
    found = [_check(options, entry) for entry in _chosen(options, store)]
    if options.path and not found:
        raise UserError(
            f"there is no copy of {options.path} in {options.stage_dir}: hpc stage {options.path} makes one"
        )
    if options.json:
        cli.print_json(found)
    for check in [] if options.json else found:
        names = ", ".join(check["damaged"][:3]) + (" ..." if len(check["damaged"]) > 3 else "")
        print(f"{check['source']}: " + (f"damaged: {names}; {check['now']}" if check["damaged"] else check["now"]))
    return int(any(check["now"] != _WHOLE for check in found))


def _check(options: StageOptions, entry: CacheEntry) -> dict[str, Any]:
    manifest, held = entry.manifest(), entry.lock_for_use()
    described = {"path": str(entry.data), "source": manifest.source if manifest else None, "damaged": list[str]()}
    if manifest is None or held is None:
        if held is not None:
            os.close(held)
        return {**described, "source": entry.name, "now": "it is being made or deleted, so nobody can say"}
    try:
        with entry.locked_for_copy(lambda: time.sleep(_POLL_SECONDS)):
            described["damaged"] = entry.find_damaged(manifest, lambda: False, read_all=True)
    finally:
        os.close(held)
    return {**described, "now": _mend(options, entry, Path(manifest.source)) if described["damaged"] else _WHOLE}


def _mend(options: StageOptions, entry: CacheEntry, source: Path) -> str:
    """What became of a damaged copy."""
    try:
        if list_source(source).version == entry.name and _stage(options, source, read=True).path == entry.data:
            return "mended"
    except TorchrelayError:
        pass  # the source is gone
    if not entry.delete():
        return "still damaged: a run reads it, so end that run first"
    return "deleted: its source is gone, or another one by now, or was packed from it; the next run makes it again"


def _stage(options: StageOptions, source: Path, *, read: bool) -> Staged:
    console = Console(stderr=True, quiet=options.json)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)

        def watch(progress: CopyProgress | None) -> bool:
            _draw(bar, task, progress)
            return False

        with Stager(options.stage_dir.absolute(), watch=watch) as stager:
            return stager.stage(source, read_all=read)


def _draw(bar: Progress, task: TaskID, progress: CopyProgress | None) -> None:
    if progress is not None:
        bar.update(task, description=progress.activity, total=progress.bytes_total, completed=progress.bytes_done)


def _answer(options: StageOptions, staged: Staged) -> int:
    if options.json:
        cli.print_json(
            {
                "path": str(staged.path),
                "reused": staged.reused,
                "in_place": staged.in_place,
                "seconds": staged.seconds,
                "bytes_from_source": staged.bytes_from_source,
                "repaired": staged.repaired,
                "evicted": staged.evicted,
                "in_memory": staged.in_memory,
            }
        )
    elif staged.in_place:
        print(f"not copied: {staged.in_place}")
    else:
        how = "was there already" if staged.reused else f"{decimal(staged.bytes_from_source)} in {staged.seconds:.1f} s"
        print(f"{staged.path} ({how})")
        if staged.in_memory:
            room = decimal(available_bytes(options.stage_dir))
            print(f"{options.stage_dir} is memory, not disk: the copy takes some of it, and leaves room for {room}")
    return int(staged.in_place is not None)


if __name__ == "__main__":
    sys.exit(main())
