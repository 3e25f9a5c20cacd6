import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest
from support.cluster import need

from hpc.base.files import (
    append_json_line,
    last_json_line,
    read_json_lines,
    refresh_nfs_cache,
    write_atomic,
    write_exclusive,
)


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomic(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _try(path: Path, text: str, results: "multiprocessing.Queue[str | None]") -> None:
    results.put(text if write_exclusive(path, text) else None)


def test_of_many_exclusive_writers_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    path = tmp_path / "claim"
    writers = [context.Process(target=_try, args=(path, str(i) * 1000, results)) for i in range(8)]
    for writer in writers:
        writer.start()
    won = [text for text in (results.get(timeout=30) for _ in writers) if text]
    for writer in writers:
        writer.join()
    assert len(won) == 1
    assert path.read_text() == won[0]
    assert list(tmp_path.iterdir()) == [path]


def test_torn_line_loses_no_other_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_json_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": 2, "b"')
    assert last_json_line(path) == {"a": 1}
    append_json_line(path, {"a": 3})
    assert [record["a"] for record in read_json_lines(path)] == [1, 3]
    assert last_json_line(path) == {"a": 3}


def test_refreshing_leaves_the_users_mode_and_needs_no_right_to_change_it(tmp_path: Path) -> None:
    directory = tmp_path / "events"
    directory.mkdir()
    directory.chmod(0o755)
    before = directory.stat()
    refresh_nfs_cache(directory)
    assert (directory.stat().st_mode, directory.stat().st_ctime_ns) == (before.st_mode, before.st_ctime_ns)
    need("mount")
    subprocess.run(["mount", "--bind", directory, directory], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        refresh_nfs_cache(directory)
    finally:
        subprocess.run(["umount", directory], check=True)
