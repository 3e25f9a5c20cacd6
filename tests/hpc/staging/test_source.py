"""Listing a source."""

import gc
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc.staging.source import SourceWalk


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Python's garbage collector stops all threads, too: that is not what is measured."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_listing_many_files_does_not_keep_other_threads_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc.staging.source._LISTING_THREADS", 1)  # several would take turns with the ticker
    real, source = tmp_path / "real", tmp_path / "data"
    real.mkdir()
    source.mkdir()
    for number in random.Random(1).sample(range(1000), k=1000):
        (real / f"{number}.jpg").touch()
    for number in range(300):
        (source / f"class-{number}").symlink_to(real)
    longest, done = 0.0, threading.Event()

    def tick() -> None:
        """Find the longest time without a turn, in CPU seconds: what else the machine does is not counted."""
        nonlocal longest
        last = time.process_time()
        while not done.wait(0.001):
            last, before = time.process_time(), last
            longest = max(longest, last - before)

    ticker = threading.Thread(target=tick)
    ticker.start()
    listing = SourceWalk(source).run()
    done.set()
    ticker.join()
    assert len(listing.files) == 300_000
    shuffled = random.Random(1).sample(listing.files, k=300_000)
    began = time.process_time()
    shuffled.sort()
    assert longest < (time.process_time() - began) / 10, "one call sorted all names"


def test_listing_has_every_directory_and_file_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/2", "b/1", "b-c/3", "a", "b/c/4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    listing = SourceWalk(tmp_path).run()
    assert [file.name for file in listing.files] == ["a", "b/1", "b/2", "b-c/3", "b/c/4"]
    assert listing.directories == ("b", "b-c", "b/c", "empty")
    assert SourceWalk(tmp_path).run().version == listing.version
